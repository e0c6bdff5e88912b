"""The README runs as it stands: its Python, in one program, and its command lines."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GIVEN = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(
    n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
))
ids, other_ids = torch.randint(0, 64, (4, 8)), torch.randint(0, 64, (4, 8))
labels = ids
loader = [{"input_ids": ids, "labels": labels}] * 3
"""
"""What the README leaves to its reader: a model, a loader and a configuration."""
FOR_PLANNING = """
config = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512,
)
ids = torch.zeros(64, 16, dtype=torch.long)
"""
FACTORY = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM
{FOR_PLANNING}

def llama():
    return LlamaForCausalLM(config), {{"input_ids": ids, "labels": ids}}
"""


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_python_trains_plans_and_draws(tmp_path: Path) -> None:
    first, loop, planning = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    checks = """
assert all(loss.isfinite() for loss in losses)
first = losses[0].item()
assert loss.item() < first
compiled.close()
"""
    noted = loop.replace(
        "    loss.backward()\n", "    losses.append(loss.detach())\n    loss.backward()\n"
    )
    assert noted != loop
    script = "\n".join(
        (GIVEN, first, "losses = []\ncompiled.train()", noted, checks, FOR_PLANNING, planning)
    )
    (tmp_path / "readme.py").write_text(script)
    printed = run([sys.executable, "readme.py"], tmp_path)
    assert "measured steps: " in printed
    assert "best other choice" in printed
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "plan.json").exists()


def test_its_command_lines_plan_and_explain(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(FACTORY)
    lines = re.findall(r"^autopar (.*?)(?:\s+#.*)?$", README, re.M)
    assert [line.split()[0] for line in lines] == ["plan", "explain"]
    for line in lines:
        printed = run([sys.executable, "-m", "autopar", *shlex.split(line)], tmp_path)
        assert printed
    assert "model.layers.3.mlp in" in printed
