"""Lightning Fabric and Trainer under a recipe: losses match the engine's, and checkpoints keep the state."""

import pytest
import torch
import torch.nn.functional as F
from hosting import RECIPES, STEPS, batches, engine_run, same, tiny, weights

import narrowgauge as ng

lightning = pytest.importorskip("lightning")

from narrowgauge.integrations.gauges import Gauges  # noqa: E402
from narrowgauge.integrations.lightning import ng_precision  # noqa: E402
from narrowgauge.nn.products.bf16_for_now import bf16_for_now  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*treespec.*"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


def make_fabric(recipe, **options):
    plugin = ng_precision(recipe, **options)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    model = tiny.make_model()
    optimizer = tiny.make_optimizer(model)
    setup = plugin.setup if "lean" in recipe else lightning.Fabric.setup
    model, optimizer = setup(fabric, model, optimizer)
    return plugin, fabric, model, optimizer


def train_fabric(run, data, clip=None, accumulate=1):
    _, fabric, model, optimizer = run
    losses = []
    for number, (points, labels) in enumerate(data, start=1):
        with fabric.no_backward_sync(model, enabled=False):
            loss = F.cross_entropy(model(points), labels)
            fabric.backward(loss / accumulate)
        losses.append(loss.item())
        if number % accumulate == 0:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, error_if_nonfinite=False, **clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = tiny.make_model()
        self.losses, self.norms = [], []

    def training_step(self, batch, _):
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, _):
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())

    def configure_optimizers(self):
        return tiny.make_optimizer(self)


def make_trainer(recipe, folder, epochs=1, library=lightning, family=None, engine_options=None, **options):
    return library.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=ng_precision(recipe, family=family, **(engine_options or {})), **options,
    )  # fmt: skip


class Listed(torch.utils.data.Dataset):
    """Ready-made batches."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def loader(data):
    return torch.utils.data.DataLoader(Listed(data), batch_size=None)


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16-lean"])
def test_fabric_losses_match_the_engine(recipe):
    assert same(train_fabric(make_fabric(recipe), batches()), engine_run(recipe, batches())[0])


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_fabric_accumulates(recipe):
    expected, _ = engine_run(recipe, batches(), accumulate=2)
    assert same(train_fabric(make_fabric(recipe), batches(), accumulate=2), expected)


def test_fabric_clips_unscaled_gradients():
    run = plugin, fabric, model, optimizer = make_fabric("fp16")
    points, labels = batches()[0]
    fabric.backward(F.cross_entropy(model(points), labels))
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
    optimizer.step()
    assert plugin.engine.report.grad_norm == pytest.approx(0.5, rel=1e-4)
    train_fabric(run, batches()[1:], clip={"max_norm": 0.5})
    assert norm.item() < 100  # a scaled norm would be 65536 times larger
    _, engine = engine_run("fp16", batches(), clip_norm=0.5)
    torch.testing.assert_close(weights(model), weights(engine.model), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("clip", [None, {"max_norm": 0.5}, {"clip_val": 0.1}])
@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_fabric_skips_an_overflow(recipe, clip):
    run = plugin, _, model, _ = make_fabric(recipe)
    before = weights(model)
    train_fabric(run, batches(1, bad=[0]), clip=clip)
    assert torch.equal(weights(model), before)
    assert plugin.engine.skipped == 1
    assert not plugin.engine.report.applied
    if recipe == "fp16":
        assert plugin.engine.scaler.get_scale() == 32768


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8", "fp8-lean"])
def test_fabric_checkpoints_keep_the_state(recipe, tmp_path):
    data = batches(STEPS, bad=[1])
    expected, _ = engine_run(recipe, data)
    first, second = make_fabric(recipe), make_fabric(recipe)
    losses = train_fabric(first, data[:3])
    for run, verb in ((first, "save"), (second, "load")):
        plugin, fabric, model, optimizer = run
        getattr(fabric, verb)(tmp_path / "half.ckpt", {"model": model, "optimizer": optimizer, "precision": plugin})
    assert same(losses + train_fabric(second, data[3:]), expected)
    assert second[0].engine.skipped == 1


def test_fabric_runs_a_frozen_model_under_the_recipe():
    _, fabric, model, _ = make_fabric("bf16")
    teacher = fabric.setup(tiny.make_model().requires_grad_(False))
    points = batches(1)[0][0]
    assert torch.equal(teacher(points), model(points))


def test_gauges_under_fabric():
    plugin, *_ = run = make_fabric("fp16")
    told = []
    gauges = Gauges(plugin.engine, every=100, tell=told.append)
    losses = train_fabric(run, batches(STEPS, bad=[2]))
    assert [finding.rule for finding in gauges.finish()] == ["bad-batch"]
    assert told[0].startswith("serious: bad-batch at step 3")
    assert plugin.engine.watchers == []
    assert same(losses, engine_run("fp16", batches(STEPS, bad=[2]))[0])


def test_fabric_mistakes_give_one_line_errors():
    _, fabric, model, optimizer = make_fabric("fp16")
    with pytest.raises(ng.UsageError, match="trains one model"):
        fabric.setup(tiny.make_model())
    with pytest.raises(ng.UsageError, match=r"engine\.step before engine\.backward"):
        optimizer.step()
    points, labels = batches(1)[0]
    fabric.backward(F.cross_entropy(model(points), labels))
    with pytest.raises(ng.UsageError, match="takes no closure"):
        optimizer.step(closure=lambda: None)
    other = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step()
    fabric.backward(F.cross_entropy(model(points), labels))
    with pytest.raises(ng.UsageError, match="another optimizer was stepped before"):
        other.step()
    with pytest.raises(ng.UsageError, match="there is no engine yet"):
        _ = ng_precision("fp16").engine
    with pytest.raises(ng.UsageError, match="family='torch' is unknown"):
        ng_precision("fp16", family="torch")


def test_fabric_needs_an_optimizer_over_all_parameters():
    plugin = ng_precision("fp32")
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    model = tiny.make_model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    points, labels = batches(1)[0]
    fabric.backward(F.cross_entropy(model(points), labels))
    with pytest.raises(ng.UsageError, match="lacks some of the model's trainable parameters"):
        optimizer.step()


def test_fabric_explains_how_to_set_up_a_lean_recipe():
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=ng_precision("bf16-lean"))
    model = fabric.setup(tiny.make_model())
    with pytest.raises(ng.UsageError, match=r"plugin\.setup\(fabric, model, optimizer\)"):
        model(batches(1)[0][0])


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16-lean"])
def test_trainer_losses_match_the_engine(recipe, tmp_path):
    model = Classifier()
    make_trainer(recipe, tmp_path).fit(model, loader(batches()))
    assert same(model.losses, engine_run(recipe, batches())[0])


def test_trainer_accumulates_and_shows_unscaled_gradients(tmp_path):
    model = Classifier()
    make_trainer("fp16", tmp_path, accumulate_grad_batches=2).fit(model, loader(batches()))
    expected, engine = engine_run("fp16", batches(), accumulate=2)
    assert same(model.losses, expected)
    assert len(model.norms) == STEPS // 2
    assert max(model.norms) < 100  # scaled norms would be 65536 times larger
    assert engine.updates == STEPS // 2


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_trainer_clips_unscaled_gradients_and_skips_nonfinite_ones(algorithm, tmp_path):
    model = Classifier()
    data = batches(STEPS, bad=[2])
    trainer = make_trainer("fp16", tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
    trainer.fit(model, loader(data))
    engine = trainer.precision_plugin.engine
    assert engine.skipped == 1
    assert engine.scaler.get_scale() == 32768
    assert bool(weights(model).isfinite().all())
    if algorithm == "norm":
        _, plain = engine_run("fp16", data, clip_norm=0.1)
        torch.testing.assert_close(weights(model), weights(plain.model), rtol=1e-3, atol=1e-4)


def test_trainer_clip_norm_matches_the_engine(tmp_path):
    model = Classifier()
    make_trainer("fp16", tmp_path, engine_options={"clip_norm": 0.1}).fit(model, loader(batches()))
    assert same(model.losses, engine_run("fp16", batches(), clip_norm=0.1)[0])


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8", "bf16-lean"])
def test_trainer_checkpoints_keep_the_state(recipe, tmp_path):
    data = batches(4, bad=[1])
    expected, _ = engine_run(recipe, data * 2)
    first, second = Classifier(), Classifier()
    trainer = make_trainer(recipe, tmp_path)
    trainer.fit(first, loader(data))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert saved["NarrowgaugePrecision"]["guard"]["skipped"] == 1
    assert all(value.dtype is torch.float32 for value in saved["state_dict"].values())
    trainer = make_trainer(recipe, tmp_path, epochs=2)
    trainer.fit(second, loader(data), ckpt_path=tmp_path / "half.ckpt")
    assert same(first.losses + second.losses, expected)
    assert trainer.precision_plugin.engine.skipped == 2


class Validated(Classifier):
    def validation_step(self, batch, _):
        self.logits = self.network(batch[0])
        with bf16_for_now():
            self.in_bf16 = self.network(batch[0])


def test_trainer_validates_under_the_recipe_and_restores_the_model(tmp_path):
    model, plain = Validated(), tiny.make_model()
    data = batches(1)
    trainer = make_trainer("bf16", tmp_path)
    trainer.validate(model, loader(data), verbose=False)
    assert model.logits.dtype is torch.bfloat16
    trainer = make_trainer("fp8", tmp_path)
    trainer.fit(model, loader(data), loader(data))
    assert model.logits.dtype is torch.bfloat16
    assert torch.equal(model.logits, model.in_bf16)  # as in engine.evaluating()
    plain.load_state_dict(model.network.state_dict())
    assert torch.equal(model.network(data[0][0]), plain(data[0][0]))


@pytest.mark.parametrize("recipe", ["fp16", "fp8", "bf16-lean"])
def test_evaluation_after_training_keeps_the_state(recipe, tmp_path):
    model, data = Validated(), batches(3, bad=[1])
    trainer = make_trainer(recipe, tmp_path)
    trainer.fit(model, loader(data), loader(data))
    expected = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.validate(model, loader(data), verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)["NarrowgaugePrecision"]
    assert (saved["guard"]["updates"], saved["guard"]["skipped"]) == (3, 1)
    if recipe == "fp8":
        assert saved["tensor_scales"]["updates"] == 3
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_manual_optimization(tmp_path):
    model = Manual()
    make_trainer("fp16", tmp_path).fit(model, loader(batches()))
    assert same(model.losses, engine_run("fp16", batches())[0])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_is_skipped(tmp_path):
    class Picky(Classifier):
        def training_step(self, batch, index):
            return None if index == 1 else super().training_step(batch, index)

    model = Picky()
    make_trainer("fp16", tmp_path).fit(model, loader(batches(3)))
    data = batches(3)
    assert same(model.losses, engine_run("fp16", [data[0], data[2]])[0])


def test_trainer_mistakes_give_one_line_errors(tmp_path):
    class Two(Classifier):
        def configure_optimizers(self):
            return [tiny.make_optimizer(self.network[0]), tiny.make_optimizer(self.network[3])]

        def training_step(self, batch, _):
            raise AssertionError("never reached")

    model = Two()
    model.automatic_optimization = False
    with pytest.raises(ng.UsageError, match="configure_optimizers returns 2"):
        make_trainer("fp16", tmp_path).fit(model, loader(batches(1)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pytorch_lightning_package(tmp_path):
    other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = tiny.make_model()
            self.losses = []

        training_step = Classifier.training_step
        configure_optimizers = Classifier.configure_optimizers

    model = Other()
    make_trainer("fp16", tmp_path, library=other, family="pytorch_lightning").fit(model, loader(batches()))
    assert same(model.losses, engine_run("fp16", batches())[0])
