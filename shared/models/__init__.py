"""Model files: where they come from, and what is known about them without reading their weights."""

from shared.models.files import ModelFiles, locate

__all__ = ["ModelFiles", "locate"]
