"""The rules about narrowgauge's Engine in scripts: what each is about, how bad it is, why, and the fix."""

from __future__ import annotations

from narrowgauge.findings import NOTE, SERIOUS, WARNING
from narrowgauge.lint.rule import Rule

ENGINE_RULES = [
    Rule(
        "engine-backward",
        SERIOUS,
        "loss.backward() is called on a loss that comes from an engine's model",
        "the engine does not know of it: the loss is neither scaled nor divided by accumulate, and engine.step() "
        "raises UsageError: engine.step before engine.backward",
        "engine.backward(loss)",
    ),
    Rule(
        "engine-no-backward",
        SERIOUS,
        "engine.step() is called without an engine.backward() before it",
        "it raises UsageError: engine.step before engine.backward: there is no gradient to step with",
        "engine.backward(loss) in place of loss.backward(), once before each engine.step()",
    ),
    Rule(
        "engine-optimizer",
        SERIOUS,
        "optimizer.step() is called on an optimizer that an engine steps",
        "the weights move a second time, or with gradients that were neither unscaled, clipped nor checked for inf and "
        "NaN; after engine.step() there are no gradients left, and it does nothing",
        "remove it: engine.step() unscales, checks, clips and steps",
    ),
    Rule(
        "engine-zero-grad",
        WARNING,
        "zero_grad() is called on what an engine trains",
        "engine.step() drops the gradients after each update; dropped earlier, microbatches are missing from the "
        "update, which then fails or is made from too few of them",
        "remove it",
    ),
    Rule(
        "engine-scaler",
        SERIOUS,
        "a GradScaler is used beside an engine",
        "the engine scales the loss itself where the recipe asks for it (FP16), and divides gradients by its own scale "
        "alone: what another scaler multiplied is not taken out, or is taken out twice",
        "remove the scaler: engine.backward(loss), then engine.step()",
    ),
    Rule(
        "engine-clip",
        WARNING,
        "gradients of an engine's model are clipped by hand",
        "the engine clips in the pass that unscales and checks. By hand, gradients are clipped while they are "
        "multiplied by the loss scale (FP16), and in an accumulation a partial sum is clipped",
        "remove it, and make the engine with clip_norm=...; step.grad_norm is the norm before clipping",
    ),
    Rule(
        "engine-autocast",
        WARNING,
        "torch.autocast is used together with engine.forward() or engine.evaluating()",
        "the engine's context opens the autocast of its recipe. Another one inside of it computes in another format "
        "than the recipe says; one around it casts where the recipe says FP32",
        "remove it, and name the format in the recipe; torch.autocast(..., enabled=False) keeps a part in FP32",
    ),
    Rule(
        "engine-outside",
        WARNING,
        "an engine's model is called outside of engine.forward() and engine.evaluating()",
        "without the engine's context there is no autocast: products that should be 16-bit run in FP32 (a lean model "
        "opens its own), and what is computed from the output is not in the recipe's formats",
        "compute the model's output and the loss inside `with engine.forward():`",
    ),
    Rule(
        "engine-evaluation",
        WARNING,
        "an engine's model is evaluated outside of engine.evaluating()",
        "the model is not evaluated in the formats it is trained in: products that should be 16-bit run in FP32 (a "
        "lean model opens its own autocast), and the model may be left in training mode",
        "with engine.evaluating(): it switches gradients off and the model to evaluation mode, and puts both back",
    ),
    Rule(
        "engine-divided",
        SERIOUS,
        "the loss is divided by the number of microbatches before engine.backward() divides it again",
        "gradients are too small by that factor: clipping, epsilon and SGD's learning rate mean something else",
        "engine.backward(loss) with the loss as it is",
    ),
    Rule(
        "engine-two-networks",
        SERIOUS,
        "one engine has the optimizers of two networks that are trained in turns",
        "engine.step() steps every optimizer whose parameters got gradients, and the generator's loss gives the "
        "discriminator gradients as well: each network is trained on the other's loss",
        "name the optimizer whose turn it is: engine.step(discriminator_optimizer), engine.step(generator_optimizer); "
        "the gradients of the other are dropped",
    ),
    Rule(
        "engine-lean-save",
        WARNING,
        "a checkpoint holds a lean model's state_dict(), and not the engine's",
        "the weights of a lean recipe are BF16, and the rest of each FP32 number is kept beside them: a run that is "
        "resumed from the BF16 weights has lost 16 bits of each",
        "save engine.state_dict(), which has FP32 weights and all optimizer states; engine.load_state_dict() reads it",
    ),
    Rule(
        "engine-compiled",
        NOTE,
        "the model is compiled before the engine gets it",
        "names in engine.state_dict() begin with _orig_mod., which the recipe's keep= and other programs do not "
        "expect, and what is compiled does not know which attention backends the recipe allows",
        "ng.Engine(model, optimizer, ..., compile=True) with the model as it is",
    ),
]
