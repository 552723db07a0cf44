"""Reference trainings: blocks of this library on small tasks, and the checkpoints they leave (`cumulant train`)."""

from cumulant.paper.trainings.checkpoints import Checkpoint, load_checkpoint

__all__ = ["Checkpoint", "load_checkpoint"]
