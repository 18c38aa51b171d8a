"""The model card of an export. What writes the folder is :mod:`farspan.checkpoints.export`."""
