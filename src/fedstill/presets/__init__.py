"""The papers' tables and figures as settings, one readable file each, with the papers' own numbers."""
