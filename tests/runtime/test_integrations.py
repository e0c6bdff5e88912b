"""Other libraries' training loops: the same losses, norms, rates and weights as without autopar."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

import autopar
from autopar.base.errors import InputError, OptimizerError
from autopar.integrations.lightning import AutoparModule
from autopar.integrations.lightning import ThroughputCallback as LightningThroughput
from autopar.integrations.transformers import AutoparTrainer, ThroughputCallback

VOCABULARY, LENGTH = 61, 12
OPTIONS = {"profile_limit_s": 0.0}
pytestmark = pytest.mark.usefixtures("reused_workers")


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def texts(num: int, seed: int = 1) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY, (num, LENGTH), generator=generator)
    found = []
    for place, row in enumerate(rows):
        labels = row.clone()
        labels[: place % 4] = -100  # other numbers of labels in every text
        found.append({"labels": labels, "input_ids": row})
    return found


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "weight_decay": 0.1, "max_grad_norm": 1.0, "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4, "num_train_epochs": 1, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **(given | options))


def trainers(
    folder: Path, model: nn.Module, more: dict[str, Any] | None = None, **options: Any
) -> tuple[Trainer, AutoparTrainer]:
    """The plain Trainer and ours, of the same model and arguments."""
    more = {"train_dataset": texts(22), "eval_dataset": texts(6, seed=2)} | (more or {})
    plain = Trainer(copy.deepcopy(model), arguments(folder / "plain", **options), **more)
    ours = AutoparTrainer(
        copy.deepcopy(model), arguments(folder / "ours", **options), devices=2,
        compile_options=OPTIONS, **more,
    )  # fmt: skip
    return plain, ours


def train(trainer: Trainer, resume: str | None = None) -> None:
    """Train on the texts in the order that the seed draws."""
    set_seed(3)
    trainer.train(resume_from_checkpoint=resume)


def logged(trainer: Trainer, *names: str) -> list[list[float]]:
    return [[entry[n] for n in names] for entry in trainer.state.log_history if names[0] in entry]


def assert_same_weights(model: nn.Module, other: nn.Module, tolerance: float = 1e-9) -> None:
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(
            tensor,
            expected[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def assert_same_run(plain: Trainer, ours: AutoparTrainer, tolerance: float = 1e-9) -> None:
    """Where the gradient is 0, as that of the keys' bias, an update may be rounding alone."""
    for names in (("loss", "grad_norm", "learning_rate"), ("eval_loss",)):
        expected = logged(plain, *names)
        torch.testing.assert_close(
            torch.tensor(logged(ours, *names)), torch.tensor(expected), rtol=1e-6, atol=1e-8
        )
    assert_same_weights(ours.model, plain.model, tolerance)


class Rates(TrainerCallback):
    """The learning rate of the devices' next step and that of the Trainer's optimizer, by step."""

    def __init__(self) -> None:
        self.trainer: AutoparTrainer | None = None
        self.seen: list[tuple[float, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        assert self.trainer.compiled is not None
        group = self.trainer.compiled.optimizer_state_dict()["param_groups"][0]
        self.seen.append((group["lr"], self.trainer.optimizer.param_groups[0]["lr"]))


def test_trainer_trains_an_epoch_as_without_autopar(tmp_path: Path) -> None:
    plain, ours = trainers(
        tmp_path, gpt2(), eval_strategy="steps", eval_steps=2, eval_on_start=True
    )
    rates = Rates()
    rates.trainer = ours
    ours.add_callback(rates)
    train(plain)
    train(ours)
    assert len(logged(ours, "loss")) == 6
    assert_same_run(plain, ours)
    assert [used for used, _ in rates.seen] == [reported for _, reported in rates.seen]
    expected, found = plain.predict(texts(5, seed=4)), ours.predict(texts(5, seed=4))
    torch.testing.assert_close(torch.tensor(found.predictions), torch.tensor(expected.predictions))
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"])


def test_trainer_joins_the_batches_of_an_update(tmp_path: Path) -> None:
    """22 texts by 4 are 6 batches, the last of 2: updates of 2 batches, the last of 6 texts."""
    plain, ours = trainers(tmp_path, gpt2(), gradient_accumulation_steps=2, max_grad_norm=0.05)
    train(plain)
    train(ours)
    assert len(logged(ours, "loss")) == 3
    assert ours.compiled is not None
    assert ours.compiled.plan.schedule.num_microbatches == 2
    assert_same_run(plain, ours)


@pytest.mark.parametrize("first", ["plain", "ours"])
def test_trainers_resume_from_each_others_checkpoints(first: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "dataloader_drop_last": True}
    if first == "plain":
        trainer, _ = trainers(tmp_path, gpt2(), optim="sgd", optim_args="momentum=0.9", **options)
        _, other = trainers(tmp_path, gpt2(), optim="sgd", optim_args="momentum=0.9", **options)
    else:
        _, trainer = trainers(tmp_path, gpt2(), **options)
        other, _ = trainers(tmp_path, gpt2(), **options)
    train(trainer)
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / first / "checkpoint-5")
    assert_same_weights(saved, trainer.model)
    train(other, str(tmp_path / first / "checkpoint-3"))
    names = "loss", "grad_norm", "learning_rate"
    torch.testing.assert_close(
        torch.tensor(logged(other, *names)), torch.tensor(logged(trainer, *names)),
        rtol=1e-6, atol=1e-8,
    )  # fmt: skip
    assert_same_weights(other.model, trainer.model)


def test_trainer_loads_the_best_model_and_trains_on(tmp_path: Path) -> None:
    """The learning rate is so high that an earlier model is the best."""
    plain, ours = trainers(
        tmp_path, gpt2(), eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, max_steps=3, learning_rate=1.0, warmup_steps=0,
    )  # fmt: skip
    train(plain)
    train(ours)
    best = plain.state.best_global_step
    assert best is not None
    assert best < 3
    assert ours.state.best_global_step == best
    # Biases of keys have no gradient but rounding errors, which Adam at this rate makes 1e-8.
    assert_same_weights(ours.model, plain.model, 1e-6)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"])
    train(plain)
    train(ours)
    assert len(logged(ours, "loss")) == 3
    assert_same_run(plain, ours, 1e-6)


def test_trainer_takes_an_optimizer_over_whole_parameters_where_they_are_whole(
    tmp_path: Path,
) -> None:
    options = {"optim": "adafactor", "max_steps": 3}
    plain, _ = trainers(tmp_path, gpt2(), **options)
    ours = AutoparTrainer(
        gpt2(), arguments(tmp_path / "ours", **options), devices=2, train_dataset=texts(22),
        compile_options={**OPTIONS, "constraints": [autopar.Force("data_parallel")]},
    )  # fmt: skip
    train(plain)
    train(ours)
    assert_same_run(plain, ours, 1e-6)


def test_trainer_computes_in_bfloat16(tmp_path: Path) -> None:
    ours = AutoparTrainer(
        gpt2().float(), arguments(tmp_path, bf16=True, max_steps=1, eval_on_start=True,
        eval_strategy="epoch"), devices=2, train_dataset=texts(8), eval_dataset=texts(4),
        compile_options=OPTIONS,
    )  # fmt: skip
    train(ours)
    assert ours.compiled is not None
    precision = ours.compiled.plan.graph.precision
    assert precision is not None
    assert precision.compute == "bf16"
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"fp16": True}, "fp16=True"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
    ],
    ids=["fp16", "label_smoothing", "neftune", "auto_find_batch_size"],
)
def test_trainer_refuses_what_the_devices_would_not_see(
    options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=name):
        AutoparTrainer(gpt2(), arguments(tmp_path, **options), devices=2)


def test_trainer_refuses_a_schedule_that_needs_a_metric(tmp_path: Path) -> None:
    _, ours = trainers(
        tmp_path, gpt2(), lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch"
    )
    with pytest.raises(OptimizerError, match="ReduceLROnPlateau is stepped by a metric"):
        ours.train()


class Scaled(torch.optim.SGD):
    """Has an option that its parameter groups do not show."""

    def __init__(self, params: Any, lr: float = 0.1, *, factor: float) -> None:
        super().__init__(params, lr)
        self.factor = factor


def test_trainer_refuses_an_optimizer_with_hidden_options(tmp_path: Path) -> None:
    model = gpt2()
    optimizer = Scaled(model.parameters(), factor=2.0)
    ours = AutoparTrainer(
        model, arguments(tmp_path), devices=2, train_dataset=texts(8), optimizers=(optimizer, None)
    )
    with pytest.raises(OptimizerError, match="Scaled cannot be made again on each device"):
        ours.train()


def test_trainer_logs_throughput(tmp_path: Path) -> None:
    _, ours = trainers(tmp_path, gpt2(), logging_strategy="no", dataloader_drop_last=True)
    ours.add_callback(ThroughputCallback(ours, every=2))
    ours.train()
    found = [entry for entry in ours.state.log_history if "tokens_per_s" in entry]
    assert [entry["step"] for entry in found] == [2, 4]
    assert ours.hosted is not None
    assert ours.compiled is not None
    totals, prediction = ours.hosted.totals, ours.compiled.plan.prediction
    assert (totals.num_steps, totals.num_samples) == (5, 4 * 4)
    assert totals.num_tokens == 4 * 4 * LENGTH
    assert totals.time_s < ours.state.log_history[-1]["train_runtime"]
    flops_per_token = prediction.model_flops / (4 * LENGTH)
    peak = prediction.model_flops / prediction.model_flops_utilisation / prediction.step_time_s
    for entry in found:
        assert entry["mfu"] == pytest.approx(entry["tokens_per_s"] * flops_per_token / peak)
        assert entry["peak_memory_gib"] > 0


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, num_labels=5, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config).double()


def images(num: int, seed: int = 1) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(num, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (num,), generator=generator)
    return [{"pixel_values": p, "labels": y} for p, y in zip(pixels, labels)]


class Eager(LightningModule):
    """The same training by Lightning alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)


class OnDevices(AutoparModule):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert not self.training
        self.log("val_loss", self(**batch).loss)


def module(model: nn.Module) -> OnDevices:
    return OnDevices(
        model, 2, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
        max_grad_norm=1.0, **OPTIONS,
    )  # fmt: skip


class Seen(Callback):
    """Records the values that a run logs, by training batch and by validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validations: list[float] = []
        self.rates: list[float] = []
        self.modes: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())
        self.modes.append(pl_module.training)
        if "learning_rate" in trainer.callback_metrics:
            self.rates.append(trainer.callback_metrics["learning_rate"].item())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append(trainer.callback_metrics["val_loss"].item())


def fit(run: LightningModule, folder: Path, *, resume: str | None = None, **options: Any) -> Seen:
    """Two epochs of 5 batches of 4 images, with a validation after each."""
    seen = Seen()
    given: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": False, "callbacks": []}
    given |= options
    given["callbacks"] = [seen, *given["callbacks"]]
    trainer = LightningTrainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **given,
    )  # fmt: skip
    trainer.fit(
        run, DataLoader(images(20), batch_size=4), DataLoader(images(4, seed=2), batch_size=4),
        ckpt_path=resume,
    )  # fmt: skip
    return seen


def test_lightning_trains_as_without_autopar(tmp_path: Path) -> None:
    expected, ours = Eager(vit()), module(vit())
    before = fit(expected, tmp_path, gradient_clip_val=1.0)
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}", monitor=None)
    after = fit(ours, tmp_path, enable_checkpointing=True, callbacks=[saving])
    assert after.losses == pytest.approx(before.losses, rel=1e-9)
    assert after.validations == pytest.approx(before.validations, rel=1e-6)
    assert after.modes == [True] * 10
    assert after.rates == pytest.approx([1e-2 * 0.5 ** (step // 2) for step in range(10)])
    assert_same_weights(ours, expected)

    resumed = module(vit())
    again = fit(resumed, tmp_path, resume=str(tmp_path / "epoch=0.ckpt"))
    assert again.losses == pytest.approx(before.losses[5:], rel=1e-9)
    assert_same_weights(resumed, expected)


class Two(AutoparModule):
    def configure_optimizers(self) -> Any:
        halves = list(self.model.parameters())
        return [torch.optim.SGD(halves[:4], lr=0.1), torch.optim.SGD(halves[4:], lr=0.1)]


def test_lightning_refuses_what_the_devices_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="several optimizers"):
        fit(Two(vit(), 2, **OPTIONS), tmp_path)
    with pytest.raises(InputError, match="there is no optimizer"):
        fit(AutoparModule(vit(), 2, **OPTIONS), tmp_path)
    with pytest.raises(InputError, match="nonfinite='skip'"):
        AutoparModule(vit(), 2, nonfinite="skip")
    with pytest.raises(InputError, match="precision='fp16' skips steps"):
        AutoparModule(vit(), 2, precision="fp16")
    with pytest.raises(InputError, match="every is 0"):
        LightningThroughput(every=0)


def test_lightning_logs_throughput(tmp_path: Path) -> None:
    found: list[dict[str, float]] = []

    class Note(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.append({k: v.item() for k, v in trainer.callback_metrics.items()})

    callbacks = [LightningThroughput(every=2), Note()]
    fit(module(vit()), tmp_path, max_epochs=1, callbacks=callbacks)
    assert "samples_per_s" not in found[0]
    assert found[1]["samples_per_s"] > 0
    assert found[1]["mfu"] > 0
    assert found[1]["samples_per_s"] != found[3]["samples_per_s"]


@pytest.mark.parametrize("package", ["lightning", "transformers", "accelerate"])
def test_a_missing_package_is_named(package: str) -> None:
    """In a fresh interpreter that does not find the package."""
    adapter = "lightning" if package == "lightning" else "transformers"
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "import autopar, autopar.integrations\n"
        f"try: import autopar.integrations.{adapter}\n"
        "except autopar.base.errors.PackageError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert f"pip install 'autopar[{adapter}]'" in done.stdout
