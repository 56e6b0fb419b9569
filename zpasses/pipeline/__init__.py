"""Passes and pipelines: run passes on a graph, verify it after each, and report what changed."""

from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.facts import Facts
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Pipeline, catalogue
from zpasses.pipeline.runner import PassRecord, run_passes

__all__ = ["Facts", "Level", "Options", "Pass", "PassRecord", "Pipeline", "catalogue", "run_passes"]
