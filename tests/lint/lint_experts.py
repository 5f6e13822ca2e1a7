"""Short scripts about mixtures of experts: pitfalls, with ``# lint: rule`` at their lines, and similar correct code."""

LOOP = """
model = Mixture()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""
EXPERTS_WRONG = {
    "scores cast before the choice": """
def route(router_logits, k):
    return router_logits.to(torch.bfloat16).softmax(-1).topk(k)  # lint: low-precision-router
""",
    "softmax in 16 bits": """
def route(hidden, gate, num_experts_per_tok):
    scores = F.softmax(gate(hidden), dim=-1, dtype=torch.half)
    weights, selected_experts = torch.topk(scores, num_experts_per_tok)  # lint: low-precision-router
    return weights, selected_experts
""",
    "scores cast back, several ways": """
class TopKRouter(nn.Module):
    def softmax(self, x):
        scores = F.softmax(self.gate(x), dim=-1, dtype=torch.float32).to(x.dtype)
        return scores.topk(self.num_experts_per_tok)  # lint: low-precision-router
    def sigmoid(self, x):
        scores = torch.sigmoid(self.gate(x).float()).type_as(x)
        return torch.topk(scores, self.k)  # lint: low-precision-router
    def keyword(self, x):
        orig_dtype = x.dtype
        scores = self.gate(x).float().softmax(-1).to(dtype=orig_dtype)
        return scores.argmax(-1)  # lint: low-precision-router
    def first(self, x):
        probs = torch.softmax(self.gate(x).float(), -1).to(x.dtype)
        weight, index = torch.max(probs, dim=-1)  # lint: low-precision-router
        return weight, index
""",
    "router parameters": """
class Experts(nn.Module):
    def __init__(self, config, n_experts):
        super().__init__()
        self.router = nn.Linear(64, config["num_experts"], dtype=torch.bfloat16)  # lint: low-precision-router
        self.noise = nn.Linear(64, n_experts).half()  # lint: low-precision-router
        self.gate = nn.Linear(64, config.n_routed_experts)
        if config.half:
            self.gate = self.gate.half()  # lint: low-precision-router
        self.list = nn.Linear(64, len(self.experts)).to(torch.bfloat16)  # lint: low-precision-router
""",
    "routers of other code": """
from moe import SparseMoE
block = SparseMoE(64, num_experts=8)
block.gate.to(torch.bfloat16)  # lint: low-precision-router
block.router = block.router.half()  # lint: low-precision-router
""",
    "a bias of scores": """
class Gate(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.bfloat16))  # lint: low-precision-router
        self.e_score_correction_bias = nn.Parameter(
            torch.empty((num_experts,), dtype=torch.bfloat16)  # lint: low-precision-router
        )
""",
    "a router under autocast": f"""
class Mixture(nn.Module):
    def __init__(self, dim=64, n_experts=8):
        super().__init__()
        self.gate = nn.Linear(dim, n_experts)
        self.weight = nn.Parameter(torch.zeros(n_experts, dim))
    def forward(self, x):
        logits = self.gate(x)  # lint: low-precision-router
        logits = self.gate(x.float())  # lint: low-precision-router
        router_logits = F.linear(x.float(), self.weight.float())  # lint: low-precision-router
        return logits.float().softmax(-1).topk(2).values
{LOOP}
""",
    "sums of masks": """
def balance(index, probs, num_experts):
    mask = F.one_hot(index, num_experts).bfloat16()
    counts = mask.sum(0)  # lint: counts-16bit
    counts = mask.sum(dim=1).sum(dim=0)  # lint: counts-16bit
    counts = torch.sum(mask, (0, 1))  # lint: counts-16bit
    counts = F.one_hot(index.flatten(), num_experts).half().sum(dim=[0])  # lint: counts-16bit
    counts = F.one_hot(index, num_experts).sum(0, dtype=torch.float16)  # lint: counts-16bit
    return counts
""",
    "positions": """
class SwitchRouter(nn.Module):
    def forward(self, x, index):
        mask = F.one_hot(index, self.num_experts)
        place = torch.cumsum(mask.to(torch.bfloat16), dim=0)  # lint: counts-16bit
        place = mask.half().cumsum(dim=-2)  # lint: counts-16bit
        place = mask.to(x.dtype).cumsum(0)  # lint: counts-16bit
        return place
""",
    "stored counts": """
def count(index, num_experts):
    expert_load = torch.zeros(num_experts, dtype=torch.float16)  # lint: counts-16bit
    expert_load.scatter_add_(0, index, torch.ones_like(index, dtype=torch.float16))
    return expert_load
""",
    "a cast of the model includes its buffers": """
class Router(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(num_experts))
class Counter(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.float32))
class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router(8)
class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter = Counter(8)
first = First().bfloat16()  # lint: low-precision-router
second = Second()
second.half()  # lint: counts-16bit
(first(x) + second(x)).backward()
""",
    "loops that wait": """
class Mixture(nn.Module):
    def where(self, x, index, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, k = torch.where(index == e)  # lint: expert-loop
            y[token] += self.experts[e](x[token]) * weights[token, k, None]
        return y
    def mask(self, x, index):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y[index == i] = expert(x[index == i])  # lint: expert-loop
        return y
    def named_mask(self, x, index):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (index == i).any(dim=-1)
            if mask.any():  # lint: expert-loop
                y[mask] += expert(x[mask])
        return y
    def layers(self, x, index):
        for tensor in torch.unique(index):
            expert_id = int(tensor.item())  # lint: expert-loop
            x = x + self.up[expert_id](x)
        return x
    def dictionary(self, x, mask):
        for e in range(8):
            layer = self.experts[f"expert_{e}"]
            token = mask[e].nonzero().flatten()  # lint: expert-loop
            x[token] += layer(x[token])
        return x
""",
}
EXPERTS_RIGHT = {
    "scores in FP32, weights cast": """
class Router(nn.Module):
    def __init__(self, dim, num_experts, router_dtype=torch.float32):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, dtype=torch.float32)
        self.other = nn.Linear(dim, num_experts, dtype=router_dtype)
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))
    def forward(self, x):
        scores = F.softmax(self.gate(x.float()), dim=-1, dtype=torch.float32)
        weights, index = scores.topk(2, dim=-1)
        weights = weights.to(x.dtype)
        best = scores.to(x.dtype).max()
        return weights, index
""",
    "softmax of chosen logits": """
def forward(self, x, gate, num_experts_per_tok):
    weights, index = torch.topk(gate(x), num_experts_per_tok)
    return F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype), index
""",
    "choice before the cast, and a soft mixture": """
def gate(router_logits, x, experts):
    probs = torch.softmax(router_logits.float(), -1)
    index = probs.argmax(-1)
    probs = probs.to(x.dtype)
    return index, sum(probs[:, i : i + 1] * expert(x) for i, expert in enumerate(experts))
""",
    "a format from the configuration": """
class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.router_dtype == "fp32":
            dtype = torch.float32
        else:
            dtype = torch.bfloat16
        self.gate = nn.Linear(config.dim, config.num_experts, dtype=dtype)
    def forward(self, x):
        router_probs = F.softmax(self.gate(x), dim=-1, dtype=self.dtype).to(self.input_dtype)
        return torch.max(router_probs, dim=-1)
""",
    "the next token of a mixture": """
class MoETransformer(nn.Module):
    def generate(self, tokens):
        probs = F.softmax(self(tokens)[:, -1].half(), dim=-1)
        return probs.topk(5)
    def experts(self):
        return self.blocks
""",
    "topk of other things": """
def nearest(queries, keys, k):
    scores = (queries.half() @ keys.half().t()).half()
    return scores.topk(k)
""",
    "a gate of an MLP, experts in BF16": """
class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, hidden)
        self.gate.to(torch.bfloat16)
        self.up = nn.Linear(dim, hidden, dtype=torch.bfloat16)
        self.lstm.forget_gate.half()
class Stack(nn.Module):
    def __init__(self, num_experts, dim):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_experts, dim, dtype=torch.bfloat16))
        self.up = nn.Parameter(torch.zeros(num_experts, dim, dim, dtype=torch.bfloat16))
    def forward(self, x, gate, up):
        return F.silu(gate.to(torch.bfloat16)) * up
""",
    "a model that is only run": """
class MoE(nn.Module):
    def __init__(self, dim, num_experts):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, dtype=torch.bfloat16)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_experts))
    @torch.inference_mode()
    def generate(self, x, index):
        for i, expert in enumerate(self.experts):
            x[index == i] = expert(x[index == i])
        return x
""",
    "a test of a kernel": """
def test_router(num_experts=8):
    logits = torch.randn(16, num_experts).to(torch.bfloat16)
    expected = logits.softmax(-1).topk(2)
    gate = nn.Linear(64, num_experts, dtype=torch.bfloat16)
""",
    "a router outside of autocast": f"""
import narrowgauge as ng
class Mixture(nn.Module):
    def __init__(self, dim=64, n_experts=8):
        super().__init__()
        self.gate = nn.Linear(dim, n_experts)
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            logits = self.gate(x.float())
        with torch.autocast("cuda", dtype=torch.float32):
            logits = self.gate(x)
        logits = self.route(x)
        mask = F.one_hot(logits.topk(2).indices, 8).to(x.dtype)
        return logits.sum() + mask.sum(0)  # autocast sums in FP32
    @ng.keep_fp32
    def route(self, x):
        return self.gate(x)
{LOOP}
""",
    "counts of integers, and masks in 16 bits": """
def dispatch(x, index, num_experts):
    mask = F.one_hot(index, num_experts)
    counts = mask.sum(0).to(x.dtype)
    counts = mask.float().sum(0)
    counts = torch.bincount(index.flatten(), minlength=num_experts)
    place = mask.cumsum(0) - 1
    chosen = mask.to(torch.bfloat16).sum(dim=1)
    load = mask.to(torch.bfloat16).mean(0)
    loads = mask.permute(1, 0, 2).bfloat16().sum(0)
    loads = F.one_hot(index.t(), num_experts).bfloat16().sum(0)
    loads = mask.bfloat16().view(2, -1, num_experts).sum(0)
    wide = mask.bfloat16().sum(0, dtype=torch.float32)
    unknown = mask.bfloat16().sum(dim=axis) + mask.bfloat16().cumsum(dim=axis)
    tokens_per_expert = torch.zeros(num_experts, dtype=torch.long)
    return torch.einsum("te,td->ed", chosen, x)
""",
    "classes are not experts": """
def class_counts(labels, classes):
    return F.one_hot(labels, classes).half().sum(0)
""",
    "buffers that stay in FP32": """
class Balance(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(num_experts))
        self.register_buffer("counts", torch.zeros(num_experts, dtype=torch.long))
class Own(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(num_experts))
    def _apply(self, fn):
        super()._apply(fn)
        return self
model, own = Balance(8).bfloat16(), Own(8).bfloat16()
model.expert_bias = model.expert_bias.float()
(model(x) + own(x)).backward()
""",
    "loops that do not wait": """
class Mixture(nn.Module):
    def dense(self, x, weights):
        for i, expert in enumerate(self.experts):
            x = x + weights[:, i : i + 1] * expert(x)
        return x
    def chunks(self, chunks):
        return [expert(chunk) for chunk, expert in zip(chunks, self.experts)]
    def stacked(self, x, index):
        for e in range(self.num_experts):
            token = torch.where(index == e)[0]
            x.index_add_(0, token, F.linear(x[token], self.experts_weight[e]))
        return x
    def capacity(self, x, places):
        for e, expert in enumerate(self.experts):
            x = torch.where(places[e], expert(x), x)
        return x
    @torch.no_grad()
    def evaluate(self, x, index):
        for i, expert in enumerate(self.experts):
            x[index == i] = expert(x[index == i])
        return x
""",
}
