"""Which gradients are state: those that no optimizer has used or was asked to use since the last step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.frameworks.windows import Windows, reopen


class Script:
    """One parameter each for two optimizers, and a scaler."""

    def __init__(self, scale: float = 4.0) -> None:
        self.first, self.second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        self.parts: dict[str, Any] = {
            "a": torch.optim.SGD([self.first], lr=0.1),
            "b": torch.optim.SGD([self.second], lr=0.1),
            "scaler": torch.amp.GradScaler("cpu", init_scale=scale),
        }
        self.windows = Windows()
        self.windows.begin(self.parts)

    def backward(self) -> None:
        self.parts["scaler"].scale((self.first * self.second).sum()).backward()

    def finished(self) -> dict[str, Any]:
        """``run.step``: the parts with gradients in the state."""
        self.windows.step_finished()
        found: dict[str, Any] = self.windows.state(self.parts).get("gradients", {})
        return found


def test_only_an_optimizer_that_did_not_step_has_gradients_to_keep() -> None:
    script = Script()
    script.backward()
    assert script.finished().keys() == {"a", "b"}
    script.backward()
    script.parts["a"].step()
    kept = script.finished()
    assert kept.keys() == {"b"}
    assert torch.equal(kept["b"][0], torch.full((2,), 8.0))
    script.parts["b"].step()
    assert script.finished().keys() == {"a"}  # whose old gradients the script may still add to


def test_what_a_scaler_left_out_is_used() -> None:
    script = Script(scale=3e38)
    script.backward()
    for _ in range(2):
        script.backward()
    for name in ("a", "b"):
        script.parts["scaler"].step(script.parts[name])
    assert script.finished().keys() == {"a", "b"}  # asked, but the window ends with the scaler's update
    script.parts["scaler"].update()
    assert torch.equal(script.first, torch.ones(2))
    assert script.finished() == {}
    script.backward()
    assert script.finished().keys() == {"a", "b"}


def test_gradients_go_back_to_their_parameters() -> None:
    script, other = Script(), Script()
    script.backward()
    saved = {"gradients": {name: {0: grads[0].clone()} for name, grads in script.finished().items()}, "unsynced": []}
    reopen(other.parts, saved)
    assert torch.equal(other.first.grad, script.first.grad)
    saved["gradients"]["a"][0] = torch.ones(3)
    with pytest.raises(Exception, match="gradients do not fit into a: parameter 0 is missing or has another shape"):
        reopen(other.parts, saved)
