"""Networks for text, rows of token numbers in which 0 is padding: a bag of embeddings, an LSTM, and a Transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.core.errors import SettingError
from fedstill.models.base import Classifier
from fedstill.models.checks import whole

BUCKET = 8  # a batch is as wide as its longest text, rounded up to a multiple of this


def trimmed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens without the columns that are padding in the whole batch, and which of the rest are tokens, (B, L) each.

    However much padding there is, the network sees the same. A text without tokens is one token of padding.

    >>> trimmed(torch.tensor([[5, 6, 0, 0, 0, 0, 0, 0, 0]]))[0].shape
    torch.Size([1, 8])
    """
    real = x != 0
    if torch.compiler.is_exporting():  # a graph has one width
        return x.long(), real | (torch.arange(x.shape[1]) == 0)
    longest = int((real * torch.arange(1, x.shape[1] + 1)).max()) if len(x) else 1
    width = min(x.shape[1], max(1, -(-longest // BUCKET)) * BUCKET)
    real = real[:, :width]
    real[:, 0] = True
    return x[:, :width].long(), real


def mean_of(states: Tensor, real: Tensor) -> Tensor:
    """The mean over the tokens of each text: (B, L, d) and (B, L) to (B, d)."""
    weights = real.unsqueeze(2).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


class Bag(Classifier):
    """The mean of the tokens' embeddings, and a linear classifier."""

    def __init__(self, vocabulary: int, classes: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.head = nn.Linear(dim, classes)
        self.feature_dim = dim

    def features(self, x: Tensor) -> Tensor:
        tokens, real = trimmed(x)
        return mean_of(self.embedding(tokens), real)


class LSTM(Classifier):
    """Layers of LSTM over the tokens' embeddings; what the last one holds after the last token is classified."""

    def __init__(self, vocabulary: int, classes: int, dim: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.lstm = nn.LSTM(dim, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)
        self.feature_dim = hidden

    def features(self, x: Tensor) -> Tensor:
        tokens, real = trimmed(x)
        states = self.lstm(self.embedding(tokens))[0]
        last = (real * torch.arange(real.shape[1], device=x.device)).amax(
            1
        )  # padding comes after it and changes nothing
        found: Tensor = states[torch.arange(len(states), device=x.device), last]
        return found


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to what came in."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, real: Tensor) -> Tensor:
        batch, length, dim = states.shape
        qkv = self.qkv(self.norm1(states)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, L, d / heads) each
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :])
        states = states + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, dim)))
        changed: Tensor = states + self.dropout(self.mlp(self.norm2(states)))
        return changed


class Transformer(Classifier):
    """Embeddings of tokens and places, layers of attention, the mean over the tokens, and a linear classifier."""

    def __init__(
        self, length: int, vocabulary: int, classes: int, dim: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        for table in (self.embedding, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        self.feature_dim = dim

    def features(self, x: Tensor) -> Tensor:
        tokens, real = trimmed(x)
        states = self.dropout(self.embedding(tokens) + self.places.weight[: tokens.shape[1]])
        for layer in self.layers:
            states = layer(states, real)
        return mean_of(self.norm(states), real)


def bag(shape: Sequence[int], classes: int, vocabulary: int, *, dim: int = 64) -> Classifier:
    """A bag of embeddings of `dim` numbers a token."""
    return Bag(vocabulary, classes, whole("dim", dim, 1))


def lstm(
    shape: Sequence[int], classes: int, vocabulary: int, *, dim: int = 8, hidden: int = 256, layers: int = 2
) -> Classifier:
    """The LSTM that LEAF trains on Shakespeare: embeddings of 8 numbers, two layers of 256 units."""
    sizes = whole("dim", dim, 1), whole("hidden", hidden, 1), whole("layers", layers, 1)
    return LSTM(vocabulary, classes, *sizes)


def transformer(
    shape: Sequence[int],
    classes: int,
    vocabulary: int,
    *,
    dim: int = 64,
    layers: int = 2,
    heads: int = 4,
    dropout: float = 0.1,
) -> Classifier:
    """A Transformer encoder small enough to be trained from nothing on a CPU."""
    dim, heads = whole("dim", dim, 1), whole("heads", heads, 1)
    if dim % heads:
        raise SettingError(f"dim = {dim} cannot be divided among heads = {heads}")
    if not 0 <= dropout < 1:
        raise SettingError(f"dropout must be from 0 to below 1, got {dropout!r}")
    return Transformer(shape[0], vocabulary, classes, dim, whole("layers", layers, 1), heads, dropout)
