"""Bugs in mixtures of experts that were reported in public repositories, as short scripts of our own."""

GITHUB = "https://github.com"
EXPERT_BUGS = {
    "probabilities in the format of the activations before topk": (
        f"{GITHUB}/ViperEkura/AstrAI/pull/57",
        """
class MixtureLayer(nn.Module):
    def __init__(self, width, num_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.score = nn.Linear(width, num_experts, bias=False)

    def choose(self, x):
        router_logits = self.score(x)
        probs = router_logits.float().softmax(dim=-1).to(x.dtype)
        weights, experts = torch.topk(probs, self.top_k, dim=-1)  # lint: low-precision-router
        return weights / weights.sum(-1, keepdim=True), experts
""",
    ),
    "bias for load balancing is cast with the model": (
        f"{GITHUB}/NVIDIA/Megatron-LM/issues/1482",
        """
class BalancedRouter(nn.Module):
    def __init__(self, width, num_experts, rate=1e-3):
        super().__init__()
        self.rate = rate
        self.weight = nn.Parameter(torch.zeros(num_experts, width))
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))

    def rebalance(self, counts):
        self.expert_bias += self.rate * torch.sign(counts.mean() - counts)

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = BalancedRouter(64, 8)

def pretrain(loader, make_optimizer):
    model = Network().cuda().bfloat16()  # lint: low-precision-router
    optimizer = make_optimizer(model)
    for x in loader:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "numbers of tokens are cast with the model": (
        f"{GITHUB}/NVIDIA/Megatron-LM/pull/7081",
        """
class Dispatcher(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.num_experts = num_experts
        self.register_buffer("local_tokens_per_expert", torch.zeros(num_experts))

    def forward(self, index):
        self.local_tokens_per_expert += torch.bincount(index.flatten(), minlength=self.num_experts)

def pretrain(loader, make_optimizer, body):
    dispatcher = Dispatcher(128).to(torch.bfloat16)  # lint: counts-16bit
    optimizer = make_optimizer(dispatcher)
    for x, index in loader:
        dispatcher(index)
        loss = body(x, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "router in the format of autocast": (
        f"{GITHUB}/databricks/megablocks/issues/91",
        """
class LearnedRouter(nn.Module):
    def __init__(self, width=64, moe_num_experts=8):
        super().__init__()
        self.layer = nn.Linear(width, moe_num_experts, bias=False)

    def forward(self, x):
        scores = self.layer(x).softmax(dim=-1)  # lint: low-precision-router
        return torch.topk(scores, 2, dim=-1)

router = LearnedRouter()
optimizer = torch.optim.AdamW(router.parameters())
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        weights, experts = router(x)
        loss = weights.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
}
