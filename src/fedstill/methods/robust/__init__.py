"""Robust aggregation for any method: one honest model out of a round in which some clients may send anything."""

from fedstill.methods.robust.coordinatewise import Median, TrimmedMean
from fedstill.methods.robust.fltrust import FLTrust
from fedstill.methods.robust.rule import Robust
from fedstill.methods.robust.selection import Bulyan, Krum, MultiKrum
from fedstill.methods.robust.vectorwise import CenteredClip, GeoMed, NormClip

__all__ = [
    "Bulyan",
    "CenteredClip",
    "FLTrust",
    "GeoMed",
    "Krum",
    "Median",
    "MultiKrum",
    "NormClip",
    "Robust",
    "TrimmedMean",
]
