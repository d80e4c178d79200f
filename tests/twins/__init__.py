"""A reference twin of each method: a short plain program that stores every sequence of the algorithm.

`problem` has what they share. tests/test_twins.py compares the final weights with those of `parlay.Trainer`.
A twin takes samples in Parlay's order and random numbers from its seeds, and nothing else of Parlay.
"""
