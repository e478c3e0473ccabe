"""sbatch scripts of a small run, and of a user's own program, and the checkpoints that they look for."""

from pathlib import Path

from jaxdist.cluster.slurm import Script

TRAIN = ("-m", "jaxdist.train")


def made(**more: object) -> Script:
    settings = dict(
        program=[*TRAIN, "--mesh=4x1x1"], run_dir=Path("runs/a"), nodes="2", tasks_per_node=2, time="10", grace=60.0
    )
    return Script(**settings | dict(python="python", home=Path.cwd()) | more)


def own(**more: object) -> Script:
    """The job of a user's own script."""
    return made(program=["my train.py", "--its", "{final}"], is_train=False, **more)


def save(*steps: int) -> None:
    """Leave these checkpoints in the folder of the run."""
    for step in steps:
        Path("runs/a/checkpoints/sums").mkdir(parents=True, exist_ok=True)
        Path(f"runs/a/checkpoints/sums/{step}.json").touch()
