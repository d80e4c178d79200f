"""`parlay demo`: the main job on the embedded data, and a look at the speed of this machine's cores.

runs      five runs of ResNet-20 on the digits, one after the other, into one folder
speed     two stages on two cores against one core, a pipeline and data parallelism, in some ten seconds
folder    the demo's own folder: what an earlier demo wrote is replaced, nothing else is touched
"""
