"""Passes and pipelines: run passes on a graph, verify it after each, and report what changed."""

from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Level, Pass, PassRecord, Pipeline, catalogue, run_passes

__all__ = ["Level", "Options", "Pass", "PassRecord", "Pipeline", "catalogue", "run_passes"]
