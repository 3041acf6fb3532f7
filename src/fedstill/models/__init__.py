"""Networks: what a classifier is, and the ones that ship, built by name for an input shape."""

from fedstill.models.base import Classifier, Stacked, as_classifier
from fedstill.models.registry import build, image_size, names, options

__all__ = ["Classifier", "Stacked", "as_classifier", "build", "image_size", "names", "options"]
