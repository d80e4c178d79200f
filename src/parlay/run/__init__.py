"""A run: from a recipe to a run folder.

setup        a recipe becomes data, model, partition, method and trainer
loop         epochs, phases, steps, interrupts, the end of a run
scores       losses and accuracy of the whole network
saving       what a checkpoint holds, and how a run goes on from one
checkpoint   the files of one checkpoint        checkpoints   the folder of them
records      records.jsonl and summary.json, written and read by one schema
progress     what a terminal shows              board         TensorBoard
"""
