"""Serial training: what every method is with one stage, and what the serial epochs of all are."""

from twins.problem import Problem


def train(problem: Problem) -> None:
    for epoch in range(len(problem.phases)):
        problem.serial(epoch)
