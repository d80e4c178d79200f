"""Your own network, data and loss, trained with its layers in parallel: `python examples/own_model.py`.

Any `nn.Sequential` of blocks from one tensor to one tensor can be cut; this one works on (batch, tokens, width).
"""

import torch
from torch import nn

import parlay

TOKENS, WIDTH, CLASSES = 6, 16, 4


class Mixer(nn.Module):
    """A residual block: tokens are mixed with each other, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(TOKENS, TOKENS), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + torch.relu(self.channels(self.norm(x)))


def samples(count: int, seed: int) -> list[tuple[torch.Tensor, int]]:
    """Any data set of (input, target) pairs: here noise in which one token stands out, and the class says which."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, TOKENS, WIDTH, generator=random)
    return [(x + 2.0 * (torch.arange(TOKENS) == i % CLASSES)[:, None], i % CLASSES) for i, x in enumerate(noise)]


torch.manual_seed(0)
train_set, test_set = samples(512, seed=1), samples(128, seed=2)
model = nn.Sequential(*[Mixer() for _ in range(6)], nn.Flatten(), nn.Linear(TOKENS * WIDTH, CLASSES))

stages = parlay.partition(model, 3, example=torch.stack([x for x, _ in train_set[:8]]))
trainer = parlay.Trainer(
    stages,
    loss=nn.CrossEntropyLoss(label_smoothing=0.1),
    method=parlay.AugmentedLagrangian(),
    schedule="alternate:4:1",
    optimizer=lambda weights: torch.optim.Adam(weights, lr=0.003),
    batch_size=64,
)
result = trainer.fit(train_set, test_set, epochs=10)

print(f"cut at {stages.cuts}, states of shape {stages.shapes}, test accuracy {result.summary['test_accuracy']:.1f} %")
print(f"an ordinary model again: {result.model(torch.randn(1, TOKENS, WIDTH)).shape}")
