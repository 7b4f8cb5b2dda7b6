"""A program of the zoo that looks into itself: with the callback or call that its framework's users would add."""

import os
from typing import Any

from zoo.world import Zoo

PROGRAM = "CIUIC_TEST_WATCHED"


def main(zoo: Zoo) -> None:
    {"hf_trainer": _hf, "lightning_module": _lightning, "accelerate_loop": _accelerate}[os.environ[PROGRAM]](zoo)


def _hf(zoo: Zoo) -> None:
    from ciuic.doctor import HfCallback
    from zoo.programs import hf_trainer

    callback = HfCallback(folder=zoo.folder / "doctor")
    late = os.environ.get("CIUIC_TEST_LATE")

    class Watched(hf_trainer.OwnTrainer):
        def __init__(self, *arguments: Any, callbacks: list[Any], **options: Any) -> None:
            super().__init__(*arguments, callbacks=callbacks if late else [*callbacks, callback], **options)
            if late:
                self.add_callback(callback)

    hf_trainer.OwnTrainer = Watched
    hf_trainer.main(zoo)
    _tell(zoo, callback.incidents)


def _lightning(zoo: Zoo) -> None:
    import lightning

    from ciuic.doctor import LightningCallback
    from zoo.programs import lightning_module

    callback = LightningCallback(folder=zoo.folder / "doctor")
    trainer = lightning.Trainer
    lightning.Trainer = lambda **options: trainer(callbacks=[callback], **options)
    lightning_module.main(zoo)
    _tell(zoo, callback.incidents)


def _accelerate(zoo: Zoo) -> None:
    from ciuic.doctor import watch_accelerator
    from zoo.programs import accelerate_loop

    made: list[Any] = []
    make = accelerate_loop.make_accelerator

    def make_accelerator(zoo: Zoo) -> Any:
        accelerator = make(zoo)
        made.append(accelerator)
        watch_accelerator(accelerator, folder=zoo.folder / "doctor")
        return accelerator

    accelerate_loop.make_accelerator = make_accelerator
    accelerate_loop.main(zoo)
    made[0].end_training()
    _tell(zoo, made[0].trackers[0].incidents)


def _tell(zoo: Zoo, incidents: list[Any]) -> None:
    (zoo.folder / f"told-{zoo.rank}.txt").write_text("\n".join(incident.cause.code for incident in incidents))
