"""Flower as the network between machines."""

import os

# Flower reads these when it is imported: nothing is reported to anyone, or looked up in the network.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
