"""Kinds of information that leave a client. A site's policy is written in these words."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What a part of an uplink is, for whoever has to agree to its being sent."""

    WEIGHTS = "weights"
    CLASS_COUNTS = "class-counts"
    LOGITS = "logits"
    PREDICTIONS = "predictions"
    STATISTICS = "statistics"
    GENERATOR = "generator"
    GRADIENTS = "gradients"
    LOSS = "loss"
    STEPS = "steps"
    METRICS = "metrics"  # beside every uplink: loss and accuracy on the site's own samples
    OTHER = "other"  # of a method of one's own that does not say


COLUMN_STATISTICS = "how many values each column has, their sum and spread, and how often each category occurs"
MEANING = {
    Kind.WEIGHTS: "the trained network",
    Kind.CLASS_COUNTS: "how many samples of each class there are, or which classes; of tests, also how often each was "
    "predicted, and rightly",
    Kind.LOGITS: "a model's raw outputs, of samples or averaged over a class",
    Kind.PREDICTIONS: "a model's class probabilities, of samples or averaged over a class",
    Kind.STATISTICS: "means and covariances of features of each class; of a table, sums over its columns",
    Kind.GENERATOR: "networks that were trained to make, or to recognise, samples like the site's",
    Kind.GRADIENTS: "gradients, or sums of them",
    Kind.LOSS: "the loss of the sent model on the site's samples",
    Kind.STEPS: "how many steps were trained",
    Kind.METRICS: "training loss, and accuracy and the metrics that a run names on the site's own tests",
    Kind.OTHER: "what a method of one's own sends without saying what it is",
}
