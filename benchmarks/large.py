"""Large models planned jointly and offline, dense and mixtures of experts, on 8 to 16,384 GPUs.

Run: ``python benchmarks/large.py [words of the cases' titles]``. Each case runs in a process of its
own: the model's shapes on the meta device, nothing fixed. Prints and writes
``benchmarks/results/large.json``: wall and processor seconds by part, peak memory of the process
(targets: 60 s, or 300 s on 16,384 GPUs, and 4 GB, two cores), the plan with its predicted
throughput, model FLOP utilization and memory, and the other combinations with their times or the
reasons against them. Results that others reported for the same models are quoted with their source,
not run here. Nothing was tuned on a case that is held out.

Beside the plan, at the same prices: what experts set up by hand (`large_experts.py`). The script
fails if one of them that fits is predicted faster than the plan.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from large_experts import LLAMA_8B_ON_8, TENSOR_IN_NODES, Expert, llama_70b
from setting import setting

RESULT = Path(__file__).parent / "results" / "large.json"
TARGET_BYTES = 4e9
MAX_LISTED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the cluster it is planned for, its batch, and the results of others with it.

    Without a ``precision`` the model itself is in bfloat16.
    """

    title: str
    make: Callable[[], Any]
    preset: str
    nodes: int
    rows: int
    columns: int
    reported: str
    target_s: float = 60.0
    precision: str | None = None
    experts: tuple[Expert, ...] = ()
    held_out: bool = False


def gpt3() -> Any:
    """GPT-3 175B, as GPT-2 with other sizes and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=96, n_embd=12288, n_head=96, n_positions=2048, vocab_size=50257,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def llama_3_405b() -> Any:
    """Llama-3-405B."""
    return _llama(126, 16384, 128, 53248)


def llama_3_70b() -> Any:
    """Llama-3-70B."""
    return _llama(80, 8192, 64, 28672)


def llama_3_8b() -> Any:
    """Llama-3-8B."""
    return _llama(32, 4096, 32, 14336)


def mixtral_8x7b() -> Any:
    """Mixtral-8x7B, the default of its configuration."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(use_cache=False))


def deepseek_v3() -> Any:
    """DeepSeek-V3, the default of its configuration: 61 layers, 256 experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False))


def qwen3_235b() -> Any:
    """Qwen3-235B-A22B: 94 layers, 128 experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            num_hidden_layers=94, hidden_size=4096, num_attention_heads=64, num_key_value_heads=4,
            head_dim=128, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8,
            use_cache=False,
        )
    )  # fmt: skip


def _llama(num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=num_layers, hidden_size=hidden_size, num_attention_heads=num_heads,
            num_key_value_heads=8, intermediate_size=intermediate_size, vocab_size=128256,
            max_position_embeddings=8192, use_cache=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )
    )  # fmt: skip


CASES = (
    Case(
        title="Llama-3-8B, 8 H100, 16 x 8,192 tokens",
        make=llama_3_8b, preset="h100-sxm", nodes=1, rows=16, columns=8192, precision="bf16",
        experts=LLAMA_8B_ON_8,
        reported="beside each setup",
    ),
    Case(
        title="Llama-3-70B, 64 H100, 128 x 8,192 tokens",
        make=llama_3_70b, preset="h100-sxm", nodes=8, rows=128, columns=8192, precision="bf16",
        experts=llama_70b(64),
        reported="beside each setup; MPT-70B under FSDP with checkpointing at 2,048 tokens a row: "
        "1,039 tokens/s a GPU, 42.6% (mosaicml/llm-foundry, scripts/train/benchmarking)",
    ),
    Case(
        title="Llama-3-70B, 256 H100, 512 x 8,192 tokens",
        make=llama_3_70b, preset="h100-sxm", nodes=32, rows=512, columns=8192, precision="bf16",
        experts=llama_70b(256),
        reported="beside each setup",
    ),
    Case(
        title="GPT-3 175B, 1,024 A100-80, 1,536 x 2,048 tokens",
        make=gpt3, preset="a100-80", nodes=128, rows=1536, columns=2048,
        reported="Megatron-LM, Narayanan et al., SC '21: 138 to 163 TFLOP/s a GPU, 44 to 52% of "
        "the peak, with activations recomputed, whose FLOPs count there; Korthikanti et al., 2022, "
        "without full recomputation: 51.4% on 512 A100",
    ),
    Case(
        title="Llama-3-70B, 512 H100, 512 x 8,192 tokens",
        make=llama_3_70b, preset="h100-sxm", nodes=64, rows=512, columns=8192,
        reported="Llama 3, Dubey et al., 2024: 38 to 43% for 405B on 8,192 to 16,384 H100",
    ),
    Case(
        title="Llama-3-405B, 2,048 H100, 2,048 x 8,192 tokens",
        make=llama_3_405b, preset="h100-sxm", nodes=256, rows=2048, columns=8192,
        experts=(TENSOR_IN_NODES,),
        reported="beside a pinned mesh",
    ),
    Case(
        title="Llama-3-405B, 16,384 H100, 2,048 x 8,192 tokens",
        make=llama_3_405b, preset="h100-sxm", nodes=2048, rows=2048, columns=8192, target_s=300.0,
        reported="Llama 3, Dubey et al., 2024: 41% on 16,384 H100, in bfloat16",
    ),
    Case(
        title="Mixtral-8x7B, 64 H100, 256 x 4,096 tokens",
        make=mixtral_8x7b, preset="h100-sxm", nodes=8, rows=256, columns=4096,
        reported="nothing quoted",
    ),
    Case(
        title="DeepSeek-V3, 2,048 H100, 4,096 x 4,096 tokens",
        make=deepseek_v3, preset="h100-sxm", nodes=256, rows=4096, columns=4096,
        reported="nothing quoted",
    ),
    Case(
        title="Qwen3-235B-A22B, 512 H100, 1,024 x 4,096 tokens",
        make=qwen3_235b, preset="h100-sxm", nodes=64, rows=1024, columns=4096,
        reported="nothing quoted", held_out=True,
    ),
)  # fmt: skip


def plan_case(index: int) -> dict[str, Any]:
    """Plan one case as `autopar.plan` does, and what experts set up for it."""
    import transformers  # noqa: F401  (its import is no part of planning)

    from autopar.frontend.capture import capture
    from autopar.ir.precision import check_precision
    from autopar.options import PlanOptions
    from autopar.passes.prepare import prepare
    from autopar.planning.planner import make_planned

    case = CASES[index]
    model, cluster, batch = _setup(case)
    precision = check_precision(case.precision)
    marks: list[tuple[str, float, float]] = []

    def mark(text: str) -> None:
        marks.append((text, time.perf_counter(), time.process_time()))

    mark("capture")
    begun_s = time.process_time()
    prepared = prepare(capture(model, batch, precision=precision))
    space = PlanOptions(precision=precision).space(cluster.num_devices)
    plan = make_planned(prepared, cluster, space, begun_s=begun_s, progress=mark).plan
    mark("end")
    return {
        "case": case.title,
        "reported": case.reported,
        "held_out": case.held_out,
        **_costs(marks),
        "target_s": case.target_s,
        **_described(plan),
        "experts": [_planned(expert, prepared, cluster, precision) for expert in case.experts],
        **setting("torch", "transformers", "numpy"),
    }


def _setup(case: Case) -> tuple[Any, Any, dict[str, Any]]:
    """The model, the cluster and the batch of a case."""
    import torch

    import autopar

    cluster = autopar.Cluster.preset(case.preset, nodes=case.nodes, devices_per_node=8)
    with torch.device("meta"):
        model = case.make()
        ids = torch.zeros(case.rows, case.columns, dtype=torch.long)
    if case.precision is None:
        model = model.bfloat16()
    return model, cluster, {"input_ids": ids, "labels": ids.clone()}


def _planned(expert: Expert, prepared: Any, cluster: Any, precision: Any) -> dict[str, Any]:
    """An expert's setup with the same prices as the plan, or why it is impossible."""
    from autopar.base.errors import AutoparError
    from autopar.options import PlanOptions
    from autopar.planning.planner import make_planned

    options = PlanOptions(precision=precision, **expert.options)
    begun_s = time.process_time()
    row = {
        "name": expert.name,
        "source": expert.source,
        "reported_tokens_per_s_a_gpu": expert.reported,
        "note": expert.note,
    }
    try:
        plan = make_planned(
            prepared, cluster, options.space(cluster.num_devices), constraints=options.constraints
        ).plan
    except AutoparError as error:
        return {**row, "impossible": str(error)}
    return {
        **row, "planned_cpu_s": round(time.process_time() - begun_s, 1), **_described(plan)
    }  # fmt: skip


def _costs(marks: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Seconds by kind of step: the first word of the planner's text for it."""
    parts: dict[str, dict[str, float]] = {}
    for (text, wall_s, cpu_s), (_, wall_end_s, cpu_end_s) in itertools.pairwise(marks):
        part = parts.setdefault(text.split()[0], {"steps": 0, "wall_s": 0.0, "cpu_s": 0.0})
        part["steps"] += 1
        part["wall_s"] = round(part["wall_s"] + wall_end_s - wall_s, 2)
        part["cpu_s"] = round(part["cpu_s"] + cpu_end_s - cpu_s, 2)
    return {
        "total_wall_s": round(marks[-1][1] - marks[0][1], 1),
        "total_cpu_s": round(marks[-1][2] - marks[0][2], 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "target_bytes": TARGET_BYTES,
        "parts": parts,
    }


def _described(plan: Any) -> dict[str, Any]:
    from autopar.cost_models.allocator import device_bytes

    prediction, search = plan.prediction, plan.search
    total = sum(prediction.memory_bytes.values())
    taken = device_bytes(prediction.memory_bytes, plan.cluster.device)
    return {
        "plan": {
            "mesh of a pipeline device": str(plan.device_mesh),
            "schedule": plan.schedule.name,
            "stages": plan.schedule.num_stages,
            "pipeline devices": plan.schedule.num_devices,
            "micro-batches": plan.schedule.num_microbatches,
            "recomputed": bool(plan.recomputation),
            "recomputed in blocks": {
                f"{group.blocks[0]} and {len(group.blocks) - 1} equal ones": {
                    "kept_bytes": group.kept_bytes,
                    "of_bytes": group.default_bytes,
                    "seconds a micro-batch": group.time_s,
                }
                for group in plan.recomputation
            },
            "parameters stored": _counts(plan, "parameters by stored placement"),
            "updated early": plan.update.when == "early",
        },
        "step_s": prediction.step_time_s,
        "bubble_share": prediction.bubble_share,
        "tokens_per_s": prediction.tokens_per_s,
        "tokens_per_s_a_gpu": prediction.tokens_per_s / plan.cluster.num_devices,
        "model_flops": prediction.model_flops,
        "model_flops_utilisation": prediction.model_flops_utilisation,
        "memory_bytes": {**prediction.memory_bytes, "total": total},
        "device_bytes": taken,
        "usable_bytes": plan.cluster.usable_memory_bytes,
        "fits": taken <= plan.cluster.usable_memory_bytes,
        "others": dict(sorted(search.pipelines.items(), key=lambda item: item[1])[:MAX_LISTED]),
        "not": search.not_pipelines,
        "text": plan.report("full").splitlines(),
    }


def _counts(plan: Any, heading: str) -> dict[str, str]:
    """The lines of a section of the plan's text."""
    lines = plan.report("full").splitlines()
    found = {}
    for line in lines[lines.index(heading) + 1 :]:
        if not line.startswith("  "):
            break
        name, _, count = line.strip().partition("  ")
        found[name] = count.strip()
    return found


def _print(row: dict[str, Any]) -> None:
    held = " (held out)" if row.get("held_out") else ""
    print(
        f"{row['case']}{held}: planned in {row['total_wall_s']} s ({row['total_cpu_s']} s of "
        f"processor time), {row['peak_bytes'] / 1e9:.2f} GB"
    )
    for name, part in row["parts"].items():
        print(f"  {name}: {part}")
    print(f"  reported: {row['reported']}")
    print(f"  the plan: {_line(row)}")
    for expert in row["experts"]:
        print(f"  {expert['name']} ({expert['source']})")
        if "impossible" in expert:
            print(f"    {expert['impossible']}")
            continue
        print(f"    {_line(expert)}")
        print(f"    the plan takes {row['step_s'] / expert['step_s']:.2f} of its time")
        reported = expert["reported_tokens_per_s_a_gpu"]
        if reported:
            ratio = expert["tokens_per_s_a_gpu"] / reported
            print(f"    reported {reported:,.0f} ({expert['note']}): predicted {ratio:.2f} of it")


def _line(row: dict[str, Any]) -> str:
    plan = row["plan"]
    memory = ", ".join(
        f"{name} {size / 2**30:.1f}"
        for name, size in row["memory_bytes"].items()
        if name != "total" and size > 2**27
    )
    again_s = sum(group["seconds a micro-batch"] for group in plan["recomputed in blocks"].values())
    return (
        f"step {row['step_s']:.2f} s, {row['tokens_per_s_a_gpu']:,.0f} tokens/s a GPU, "
        f"{row['model_flops_utilisation']:.1%} of the peak; "
        f"mesh {plan['mesh of a pipeline device']}, {plan['schedule']}, "
        f"{plan['stages']} stages on {plan['pipeline devices']}, "
        f"{plan['micro-batches']} micro-batches; stored {plan['parameters stored']}; "
        f"{'recomputes' if again_s else 'recomputes nothing'}"
        f"{' ' + str(plan['recomputed in blocks']) if again_s else ''}; "
        f"{row['device_bytes'] / 2**30:.1f} of {row['usable_bytes'] / 2**30:.1f} GiB ({memory})"
    )


def _slower(row: dict[str, Any]) -> list[str]:
    """The experts' setups that are predicted faster than the plan."""
    return [
        f"{row['case']}: {expert['name']}"
        for expert in row["experts"]
        if "impossible" not in expert and expert["step_s"] < row["step_s"] * (1 - 1e-9)
    ]


def main(words: Sequence[str]) -> None:
    context = multiprocessing.get_context("spawn")
    document = json.loads(RESULT.read_text()) if RESULT.exists() else {"cases": []}
    where = {key: document[key] for key in ("machine", "versions") if key in document}
    known = {row["case"]: {**where, **row} for row in document["cases"]}
    faster = []
    for index, case in enumerate(CASES):
        if words and not any(word in case.title for word in words):
            continue
        with context.Pool(1) as pool:
            row = pool.apply(plan_case, (index,))
        known[case.title] = row
        faster += _slower(row)
        _print(row)
        cases = [known[each.title] for each in CASES if each.title in known]
        RESULT.write_text(json.dumps({"cases": cases}, indent=2) + "\n")
    if faster:
        sys.exit("faster than the plan: " + "; ".join(faster))


if __name__ == "__main__":
    main(sys.argv[1:])
