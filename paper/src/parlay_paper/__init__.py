"""The paper's tables and figures, from runs made here: what `parlay reproduce` does.

A package of its own beside Parlay, in the same checkout. It uses Parlay as anybody may.

tables        every row of the paper's tables (tables.toml): what makes its recipe, what the paper prints for it
request       what is asked for: which rows, how much shorter
runs          the rows as run folders, made one after another or
side_by_side  as processes at the same time
queue         rows with their minutes and states, run within a budget
speed         speed-ups: measured here, or projected for K devices from
isolated      stages timed in isolation, and links
columns       the columns of a table, each of one kind of number
figures       the paper's figures; images: what a VAE makes of test images
timelines     simulated timelines: which stage works when
page          a table as a section of Parlay's page
writer        JSON, CSV, Markdown, pictures and the page
command       the flags of `parlay reproduce`
methods       what only the paper's study trains with: `python -m parlay_paper train --method dni`
"""
