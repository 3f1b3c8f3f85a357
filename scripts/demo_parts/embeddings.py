"""Load two folders with transformers, embed sentences with both, and print as JSON how they compare."""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModel, AutoTokenizer

SENTENCES = (
    "A checkpoint holds the state of a training run.",
    "Heat the oil and add the chopped onions.",
    "From the saved weights one can go on learning later.",
    "The soup needs salt and a little pepper.",
    "It rained all night and the river rose.",
    "The storm brought floods to the valley.",
)


def main(original: str, exported: str) -> None:
    """Compare the two models in weights and in embeddings."""
    one, other = AutoModel.from_pretrained(original), AutoModel.from_pretrained(exported)
    embedded, again = embed(original, one), embed(exported, other)
    similarity = (embedded @ embedded.T).fill_diagonal_(-1)
    values, indices = similarity.max(dim=1)
    nearest = zip(SENTENCES, [SENTENCES[index] for index in indices], values.tolist(), strict=True)
    tensors, others = one.state_dict(), other.state_dict()
    same = tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
    found = {
        "nearest": list(nearest),
        "num_tensors": len(tensors),
        "same_tensors": same,
        "same_embeddings": torch.equal(embedded, again),
    }
    print(json.dumps(found))


@torch.no_grad()
def embed(folder: str, model: torch.nn.Module) -> torch.Tensor:
    """Give the unit vector of each sentence: the mean over its tokens."""
    tokens = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    hidden = model.eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
