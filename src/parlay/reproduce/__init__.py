"""`parlay reproduce`: the paper's tables and figures, from runs made here.

paper      every row of the tables, as data: what makes its recipe, what the paper prints for it
request    what is asked for: which rows, how much shorter, in words for the reader
runs       the rows as ordinary run folders, one after another or
beside     side by side, as processes
queue      rows with their minutes and states, served with a budget
speed      speed-ups: measured here, projected for K devices from
alone      stages timed alone, and links
columns    what stands in a table, each column of one kind of number
figures    the paper's figures
writer     JSON, CSV, Markdown, pictures and the report page
"""
