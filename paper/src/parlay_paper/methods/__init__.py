"""The methods that the paper's study needs and Parlay does not: printed variants, and two that learn their signals.

joint_penalty        the penalty method in the order that the paper prints
printed_lagrangian   the augmented Lagrangian with the printed update of the multiplier
dni                  synthetic gradients
auxnet               states that are generated from the inputs

`register` makes them known by name, as any package may; a process that trains with one calls it first.
"""

from __future__ import annotations

from parlay import methods


def register() -> None:
    stored = ("beta", "beta_final", "detail", "form", "state_step", "state_rate", "trust")
    methods.register(
        "joint-penalty",
        f"{__name__}.joint_penalty:JointPenalty",
        label="Penalty, joint",
        meaning="quadratic penalty in the printed order",
        options=stored,
    )
    methods.register(
        "printed-al",
        f"{__name__}.printed_lagrangian:PrintedLagrangian",
        label="AL, printed",
        meaning="augmented Lagrangian with the printed multiplier",
        options=(*stored, "multiplier", "multiplier_step", "reach"),
    )
    methods.register(
        "dni",
        f"{__name__}.dni:DNI",
        label="DNI",
        meaning="decoupled neural interfaces",
        entry=methods.a_stage_a_step,
        lag=lambda k, stages: 2 if k < stages - 1 else 0,
        options=("condition",),
    )
    methods.register(
        "auxnet",
        f"{__name__}.auxnet:AuxNet",
        label="AuxNet",
        meaning="auxiliary networks generate the states",
        entry=lambda k, stages: stages - 1 - k,
        lag=lambda k, stages: 2 if k > 0 else 0,  # noqa: ARG005
        options=("beta",),
    )
