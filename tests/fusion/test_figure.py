"""The figure of what is fused: its cells are the fused ops of the graph."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.colors import to_hex
from torch import nn

from autopar.fusion.figure import fusion_data, plot_fusion
from tests.fusion.families import fused_of


def mlp(width: int, act: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), act, nn.Linear(width, 4))


def test_its_cells_are_the_ops_that_each_model_computes() -> None:
    torch.manual_seed(0)
    models = [mlp(16, nn.ReLU()), mlp(16, nn.ReLU()), mlp(24, nn.Tanh())]
    batch = torch.randn(6, 8), torch.randint(0, 4, (6,))
    found = fused_of(models, batch, loss_fn=nn.functional.cross_entropy)
    data = fusion_data(found)
    assert sum(row.num_ops for row in data.rows) == len(found.ops)
    for form in data.forms:
        drawn = sum(row.num_ops * len(row.models) for row in data.rows if row.form == form)
        assert drawn == sum(len(op.models) for op in found.ops if op.form == form)
    figure, axes = plot_fusion(data)
    (mesh,) = axes.collections
    cells = np.ma.getmaskarray(mesh.get_array()).reshape(len(data.rows), 3)
    for row, hidden in zip(data.rows, cells):
        assert tuple(np.flatnonzero(~hidden)) == row.models
    figure.draw_without_rendering()
    legend = {
        text.get_text(): to_hex(patch.get_facecolor())
        for text, patch in zip(figure.legends[0].get_texts(), figure.legends[0].get_patches())
    }
    colors = mesh.get_facecolors().reshape(len(data.rows), 3, 4)
    for place, row in enumerate(data.rows):
        assert to_hex(colors[place, row.models[0]]) == legend[row.form]
    assert [text.get_text() for text in axes.get_yticklabels()] == [r.label for r in data.rows]
    assert f"{len(found.ops)} aligned ops" in figure.get_suptitle()
