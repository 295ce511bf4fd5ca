"""What a record is told of its run when that begins."""

from __future__ import annotations

from squall.runtime.job import Job
from squall.runtime.optimizers import in_words
from squall.strategies.work import BatchMethod


def facts_of(job: Job) -> dict[str, object]:
    plan, work = job.plan, job.recipe.work
    return {
        "strategy": plan.strategy, "optimizer": in_words(job.recipe), "replicas": plan.replicas, "shards": plan.shards,
        "copies": plan.settings.copies,
        "epochs": plan.epochs or "", "steps": plan.steps or "", "seconds": plan.settings.seconds or "",
        "examples_per_epoch": job.task.examples, "status": "running", "ended": "", "reason": "", "evaluating": "",
        "batch": work.batch(job.task.examples) if isinstance(work, BatchMethod) else "",
        "shard_bytes": [4 * (stop - start) for start, stop in job.ranges.shards[: plan.shards]],
        "keep_best": plan.keep_best or "", "counted": "example" if job.task.sampler is None else "position",
        "snapshot": job.restored.manifest.number if job.restored is not None else 0,
    }  # fmt: skip
