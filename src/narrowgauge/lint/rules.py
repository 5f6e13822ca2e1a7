"""The rules: what each is about, how bad it is, why, and the fix. Findings may say more, but start from here."""

from __future__ import annotations

from narrowgauge.findings import NOTE, SERIOUS, WARNING
from narrowgauge.lint.engine_rules import ENGINE_RULES
from narrowgauge.lint.rule import Rule

_ALL = [
    Rule(
        "clip-before-unscale",
        SERIOUS,
        "gradients are clipped while they are still multiplied by the loss scale",
        "the norm is 65,536 times too large, so nearly every step is clipped, and after unscaling it is 65,536 times "
        "shorter than asked for: the run hardly learns, and nothing fails",
        "call scaler.unscale_(optimizer) between backward and clipping",
    ),
    Rule(
        "clip-after-step",
        WARNING,
        "gradients are clipped after the step that used them",
        "the step was taken with unclipped gradients; clipping them now does nothing",
        "clip between backward (or unscale_) and the step",
    ),
    Rule(
        "unscale-twice",
        SERIOUS,
        "gradients are unscaled twice between two updates",
        "GradScaler raises RuntimeError: unscale_() has already been called on this optimizer since the last update()",
        "unscale once for each update: when accumulating, inside the branch that steps",
    ),
    Rule(
        "scaler-with-bf16",
        WARNING,
        "a GradScaler scales a loss that was computed in BF16",
        "BF16 has FP32's range: there is nothing to scale, and the scaler costs a pass over all gradients and a wait "
        "for the GPU at every step",
        "leave the scaler out: loss.backward(), optimizer.step()",
    ),
    Rule(
        "fp16-without-scaler",
        SERIOUS,
        "the loss is computed in FP16 and goes backward without a loss scale",
        "gradients below 6e-8 become zero in FP16, and layers stop learning without a word",
        "scale the loss with torch.amp.GradScaler('cuda'), or take dtype=torch.bfloat16, which needs no scale",
    ),
    Rule(
        "scaler-without-scale",
        SERIOUS,
        "scaler.step() unscales gradients that were never scaled",
        "gradients are divided by 65,536 for nothing: steps are as much too small, or vanish",
        "go backward with scaler.scale(loss).backward()",
    ),
    Rule(
        "step-past-scaler",
        SERIOUS,
        "optimizer.step() is called on gradients that are still multiplied by the loss scale",
        "the step is taken with gradients 65,536 times too large, and one with inf in it is taken all the same",
        "scaler.step(optimizer) in its place, then scaler.update()",
    ),
    Rule(
        "scaler-without-update",
        SERIOUS,
        "scaler.step() without a scaler.update() anywhere",
        "the scale never moves, and the second step raises RuntimeError: step() has already been called",
        "call scaler.update() once after the step",
    ),
    Rule(
        "update-before-step",
        SERIOUS,
        "scaler.update() is called before the gradients were looked at",
        "nothing has been checked yet: it raises AssertionError: No inf checks were recorded prior to update",
        "scaler.step(optimizer) first, then scaler.update()",
    ),
    Rule(
        "zero-grad-order",
        SERIOUS,
        "gradients are cleared between backward and the step that should use them",
        "every step is taken with no gradient: nothing is learnt",
        "clear gradients before backward or after the step",
    ),
    Rule(
        "half-with-scaler",
        SERIOUS,
        "a GradScaler steps a model whose parameters are FP16",
        "it raises ValueError: Attempting to unscale FP16 gradients",
        "keep the parameters in FP32 and let torch.autocast cast what pays: remove the cast of the model",
    ),
    Rule(
        "states-16bit",
        SERIOUS,
        "an optimizer is given 16-bit parameters, without FP32 masters",
        "its states have the parameters' format, and an update smaller than half a step of a 16-bit weight (0.2% of it "
        "in BF16, 0.02% in FP16) is rounded away: learning slows down and stops early",
        "keep parameters in FP32 under torch.autocast, or take an optimizer with masters "
        "(narrowgauge's recipe bf16-lean: BF16 weights that are FP32 to the bit, at 8 bytes a parameter)",
    ),
    Rule(
        "bf16-true",
        WARNING,
        "pure 16-bit training where mixed precision may be meant",
        "weights, gradients and optimizer states are all in 16 bits, and small updates are rounded away",
        "ask for the mixed kind: precision='bf16-mixed', or FP32 weights with bf16=True",
    ),
    Rule(
        "eps-below-format",
        SERIOUS,
        "an epsilon that the format rounds to zero",
        "FP16 ends at 6e-8: 1e-8 becomes 0, and where the rest is 0 the division gives inf or NaN (Adam's first step "
        "of an unused weight)",
        "keep it in FP32, or take an eps of at least 1e-4 in FP16",
    ),
    Rule(
        "half-norms",
        WARNING,
        "a normalisation layer is cast to FP16",
        "running statistics and variances of large activations overflow at 65,504 and lose what is small beside them",
        "keep norms in FP32: torch.autocast does, or call .float() on them after the cast",
    ),
    Rule(
        "autocast-backward",
        WARNING,
        "backward runs inside autocast",
        "backward already runs in the formats that forward chose; casting again is slower and not supported",
        "end the with block after the loss, and go backward outside of it",
    ),
    Rule(
        "autocast-argument",
        SERIOUS,
        "an argument of autocast or GradScaler is in the wrong place",
        "the first argument of torch.cuda.amp.autocast is `enabled`, that of torch.cuda.amp.GradScaler is `init_scale`",
        "name the argument",
    ),
    Rule(
        "custom-op",
        WARNING,
        "an autograd Function multiplies matrices, and autocast cannot see into its backward",
        "under autocast forward gets 16-bit inputs beside FP32 weights; backward runs without autocast, and fails on "
        "the mix or computes in another format than forward",
        "decorate forward with torch.amp.custom_fwd(device_type='cuda') and backward with torch.amp.custom_bwd, or "
        "use narrowgauge.keep_fp32",
    ),
    Rule(
        "manual-attention",
        WARNING,
        "attention by hand: softmax(q @ k.T) @ v",
        "the scores of all pairs are written to memory, read again, and kept for backward; in FP16 they can overflow",
        "F.scaled_dot_product_attention(q, k, v, attn_mask=..., is_causal=...), which takes the fused kernel",
    ),
    Rule(
        "manual-softmax",
        WARNING,
        "softmax by hand: exp(x) / exp(x).sum()",
        "exp overflows above 11 in FP16 and above 88 in FP32 and BF16: inf / inf is NaN",
        "torch.softmax(x, dim), which takes the maximum out first and runs in FP32 under autocast",
    ),
    Rule(
        "log-softmax",
        WARNING,
        "the logarithm of a softmax",
        "a probability that was rounded to zero gives -inf: below 6e-8 in FP16, and the epsilon that guards it is lost "
        "there as well",
        "torch.log_softmax(x, dim) (F.logsigmoid for a sigmoid), or F.cross_entropy on the logits",
    ),
    Rule(
        "half-loss",
        WARNING,
        "the loss is computed from 16-bit numbers outside autocast",
        "sums over classes and samples keep two to three digits, and a large sum overflows FP16",
        "widen first, loss_fn(logits.float(), targets), or compute the loss inside autocast, which does it",
    ),
    Rule(
        "bce-autocast",
        SERIOUS,
        "binary cross-entropy on probabilities inside autocast",
        "CUDA's autocast raises RuntimeError: binary_cross_entropy is unsafe to autocast",
        "take the sigmoid out of the model, and BCEWithLogitsLoss (F.binary_cross_entropy_with_logits) on the logits",
    ),
    Rule(
        "nan-mask",
        SERIOUS,
        "a mask is filled with a number that FP16 cannot hold",
        "FP16 ends at 65,504: masked_fill raises RuntimeError: value cannot be converted to type Half without overflow",
        "fill with float('-inf') or torch.finfo(scores.dtype).min",
    ),
    Rule(
        "tied-formats",
        SERIOUS,
        "two modules share a weight, and one of them is to have another format",
        "a shared weight has one format: casting one module casts the other, or the tie breaks without a word",
        "give both the same format, or keep both in FP32",
    ),
    Rule(
        "scale-settings",
        WARNING,
        "a loss scale that does little or harm",
        "a scale of 1 is none: gradients underflow until it has grown, which takes 2,000 steps for each doubling; a "
        "scale that grows every few steps overflows and skips as often",
        "keep the defaults (init_scale=65536, growth_interval=2000): a scale that is too high is found within seconds",
    ),
    Rule(
        "found-inf-truthy",
        WARNING,
        "_found_inf_per_device is a dictionary: it is true once filled, whether or not there was an inf",
        "every step counts as skipped",
        "compare the scale: before = scaler.get_scale(); scaler.update(); skipped = scaler.get_scale() < before",
    ),
    Rule(
        "deprecated-amp",
        WARNING,
        "a deprecated part of AMP",
        "it warns at every call, and will be removed",
        "torch.amp, with the device type as first argument",
    ),
    Rule(
        "off-multiple",
        WARNING,
        "a dimension that misses the tensor cores' multiples",
        "products want rows of 16 bytes: multiples of 8 in FP16 and BF16; FP8 refuses anything but multiples of 16",
        "pad the dimension",
    ),
    Rule(
        "keep-names-nothing",
        SERIOUS,
        "a pattern of the recipe's keep names no module",
        "what should have stayed in FP32 would not: narrowgauge refuses to train",
        "name modules by their path or class, with * and ?",
    ),
    Rule(
        "half-parameters",
        SERIOUS,
        "a parameter is in 16 bits before training begins",
        "the masters are gone already: narrowgauge refuses to train it",
        "make the model in FP32, or call model.float() before making the optimizer; the recipe does the rest",
    ),
    Rule(
        "lean-optimizer",
        SERIOUS,
        "the recipe narrows the states of AdamW, and the optimizer is another",
        "narrowgauge refuses to train it",
        "take torch.optim.AdamW, or a recipe with master=fp32 and moments=fp32",
    ),
    Rule(
        "scaler-not-saved",
        NOTE,
        "the checkpoint holds the optimizer but not the loss scale",
        "a resumed run starts at 65,536 again, and skips steps until the scale has fallen to where it was",
        "save scaler.state_dict() beside the optimizer's, and load it",
    ),
    Rule(
        "sync-in-loop",
        NOTE,
        "the loss is read at every step",
        "the CPU waits for the GPU, which then waits for the next launch",
        "add up loss.detach(), and read it every so many steps",
    ),
    Rule(
        "accumulate-undivided",
        NOTE,
        "gradients of several batches are added, and the loss is not divided by their number",
        "the gradient is the sum, not the mean: clipping, epsilon and SGD's learning rate mean something else, and "
        "FP16 overflows earlier",
        "loss = loss / accumulation_steps before backward",
    ),
    *ENGINE_RULES,
    Rule(
        "syntax",
        WARNING,
        "a file that is not Python",
        "nothing can be said about it",
        "fix the syntax",
    ),
]  # fmt: skip
RULES = {rule.name: rule for rule in _ALL}
