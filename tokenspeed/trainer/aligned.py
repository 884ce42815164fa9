"""A model whose forward is an artifact's."""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tokenspeed.artifact import Artifact, TargetSection, choose_target
from tokenspeed.compile.program import Program
from tokenspeed.errors import UsageError
from tokenspeed.runtime.loader import check_kernels
from tokenspeed.runtime.places import CpuPlace, Place, choose_place
from tokenspeed.target import Target, runnable_targets
from tokenspeed.trainer import inputs
from tokenspeed.trainer.compatible import check_model, check_same, check_training, device_of
from tokenspeed.trainer.function import Replay, Runner, Scored
from tokenspeed.trainer.inputs import Asked
from tokenspeed.trainer.new_model import load_weights
from tokenspeed.trainer.packing import Parameters, pack
from tokenspeed.trainer.replay import Replayer, plan_replay
from tokenspeed.trainer.steps import cut
from tokenspeed.trainer.weights_file import write_weights_file

_log = logging.getLogger("tokenspeed.trainer")


class AlignedForward:
    """What stands in for a model's forward. A copy of the model would compute with the weights of this one, so there
    is none: neither by ``copy.deepcopy`` nor by pickling."""

    def __init__(self, compute: Callable[..., Any], own: Callable[..., Any]):
        self._compute = compute
        self.__signature__ = inspect.signature(own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "an aligned model can be neither copied nor pickled: the copy would compute with this model's weights",
            hint="do it inside own_forward(), and align the copy; state_dict() and save_pretrained() work as ever",
        )


@dataclass
class CausalOutput:
    """What a model returns that is not of transformers."""

    loss: Tensor | None
    logits: Tensor


def align(
    model: nn.Module,
    artifact: str | os.PathLike[str] | Artifact,
    *,
    target: str | Target | None = None,
    threads: int | None = None,
    gradients: bool = True,
) -> Aligned:
    """Have ``model`` compute its forward with the kernels of ``artifact``, in their order of operations.

    From here on ``model(...)`` is computed so; ``Aligned.detach`` undoes it. Log-probabilities equal, bit for bit,
    those that an engine reports which serves the artifact on the same target with the same weights.

    Args:
        model: a causal language model of transformers, or any that has its parameters and config, on the device where
            it is to run: the CPU or one GPU.
        artifact: made by ``tokenspeed build`` from a checkpoint of the same shape. Its weights need not be the model's.
        target: of the artifact; None takes the best that runs where the model is.
        threads: of the CPU kernels; None: every core that this process may use.
        gradients: False needs less memory, and refuses to compute gradients; for a reference model.

    Raises:
        UsageError: the model is not what the artifact computes; the first difference is named.
        ArtifactError: the artifact is damaged, or has no target for where the model is.
        ResourceError: its buffers do not fit.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    program = Program.from_json(opened.read("program.json").decode())
    tensors = check_model(model, program)
    section, place = _place(opened, device_of(tensors), target, threads)
    check_kernels(section)
    plan = plan_replay(opened, section, gradients=gradients)
    return Aligned(model, opened, Parameters(program, tensors), Replayer(opened, plan, place), gradients)


def _place(
    artifact: Artifact, device: torch.device, target: str | Target | None, threads: int | None
) -> tuple[TargetSection, Place]:
    wanted = Target.parse(target) if isinstance(target, str) else target
    if device.type == "cpu":
        section = choose_target(artifact.manifest, runnable_targets(), wanted)
        return section, CpuPlace(threads, pin=False)
    section, place = choose_place(artifact.manifest, wanted, device.index or 0)
    if isinstance(place, CpuPlace):
        raise UsageError(f"the model is on {device}, and the target {section.target} runs on the CPU")
    return section, place


class Aligned:
    """A model and the artifact that computes it. Made by ``align``; not thread-safe.

    Attributes:
        model: whose parameters are trained; calling it computes with the artifact's kernels.
        artifact: whose kernels these are.
        target: that they run on.
        promised: whether the artifact promises what equality rests on: trainer alignment and batch invariance.
    """

    def __init__(
        self, model: nn.Module, artifact: Artifact, parameters: Parameters, replayer: Replayer, gradients: bool
    ):
        self.model = model
        self.artifact = artifact
        self.target = replayer.plan.section.target
        self._parameters = parameters
        self._replayer = replayer
        self._gradients = gradients
        self._runner = Runner(replayer, parameters, device_of(parameters.tensors))
        self._optimizer_steps = 0  # that changed the parameters: fused ones do not count their versions
        self._packed: tuple[tuple[int, int], ...] = ()  # what _versions() was of the weights that are packed
        envelope = artifact.manifest.envelope
        self.promised = bool(envelope.switch("trainer_alignment") and envelope.switch("batch_invariance"))
        if not self.promised:
            _log.warning(
                "%s was built with --numerics auto: these are the bits of its kernels, but that an engine has the same"
                " in every batch is promised by --numerics rl-bitwise only",
                artifact.path,
            )
        self._forward = AlignedForward(self.forward, model.forward)
        self._detached = False
        self._watch_optimizers()
        self._attach()

    # -- the forward -------------------------------------------------------------------------------------

    def logprobs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Log-probability of every token under the model, given those before it in its sequence; with gradients.

        Args:
            input_ids: [B, L] sequences, padded on either side; or, with ``cu_seqlens``, [N], one after another.
            attention_mask: [B, L], 0 where there is padding; None: nowhere.
            cu_seqlens: [S + 1], sequence i is ``input_ids[cu_seqlens[i]:cu_seqlens[i + 1]]``.
            mask: in the shape of input_ids, true for the tokens that are asked for; None: all. What is not asked for is
                not computed: the last layer's MLP and the head run for nothing else.

        Returns:
            float32 in the shape of input_ids; 0 for what is not asked for, padding, and each sequence's first token.
        """
        check_training(self.model)
        asked = inputs.for_logprobs(input_ids, attention_mask, cu_seqlens, mask)
        scored, _ = self._score(asked, logits=False)
        return torch.zeros(asked.shape, device=scored.device).index_put(asked.places(scored.device), scored)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> Any:
        """What the model's own forward returns: ``logits`` [B, L, V] float32 (0 at padding), and with ``labels`` the
        ``loss`` over those that are not -100. Both have gradients. Logits of a long batch take B L V floats:
        ``logits_to_keep`` has them of the last tokens only, and ``logprobs`` does without."""
        inputs.refuse_others(others, use_cache)
        if input_ids is None:
            raise UsageError("the aligned model needs input_ids")
        check_training(self.model)
        asked = inputs.for_logits(input_ids, attention_mask, position_ids, labels, logits_to_keep)
        scored, rows = self._score(asked, logits=True)
        assert rows is not None
        logits = torch.zeros((*asked.shape, rows.shape[1]), device=rows.device)
        logits = logits.index_put(asked.places(rows.device), rows)
        loss = None
        if asked.counted is not None:
            counted = asked.counted.to(scored.device)
            count = counted.sum() if num_items_in_batch is None else num_items_in_batch
            loss = -scored[counted].sum() / count
        return self._output(loss, asked.kept(logits))

    def _score(self, asked: Asked, *, logits: bool) -> tuple[Tensor, Tensor | None]:
        self._check_attached()
        check_same(self.model, self._parameters.tensors, self._runner.device)
        program = self._parameters.program
        inputs.check_batch(asked.batch, program.metadata.integer("vocab_size"), program.max_model_len)
        trained = [name for name, p in self._parameters.tensors.items() if p.requires_grad]
        wants_gradients = torch.is_grad_enabled() and bool(trained)
        if wants_gradients and not self._gradients:
            raise UsageError(
                "the model was aligned with gradients=False, and gradients are asked for",
                hint="compute under torch.no_grad(), or align it with gradients=True",
            )
        self._sync_changed()
        scored = Scored(asked.batch, cut(asked.batch, self._replayer.limits, may_split=not wants_gradients), logits)
        if not wants_gradients:
            return self._runner.forward(scored)
        logprobs, rows = Replay.apply(
            self._runner, scored, self._guard(), trained, *(self._parameters.tensors[n] for n in trained)
        )
        return logprobs, rows

    def _guard(self) -> Callable[[], None]:
        """Refuses a backward that comes too late. Weights whose versions torch counts it refuses by itself."""
        steps = self._optimizer_steps

        def check() -> None:
            self._check_attached()
            if self._optimizer_steps != steps:
                raise UsageError(
                    "an optimizer changed the weights between forward and backward: gradients are of the weights that"
                    " the forward had",
                    hint="compute the log-probabilities again",
                )

        return check

    def _output(self, loss: Tensor | None, logits: Tensor) -> Any:
        if not type(self.model).__module__.startswith("transformers."):
            return CausalOutput(loss, logits)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(loss=loss, logits=logits)

    # -- weights -----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Pack the model's parameters for the kernels. A forward does so by itself where a parameter has changed by
        torch's count of its versions, and after a step of a torch optimizer that has one; what is written behind
        torch's back, as through ``.data``, needs this call."""
        self._check_attached()
        self._runner.forget()
        pack(self._parameters, self._replayer.plan.values.weights, self._replayer.device.weights)
        self._replayer.device.settle_weights()
        self._packed = self._versions()

    def _sync_changed(self) -> None:
        if self._packed != self._versions():
            self.sync()

    def _versions(self) -> tuple[tuple[int, int], ...]:
        """What tells weights from other ones: each parameter's address and version, and steps of optimizers."""
        versions = ((p.data_ptr(), p._version) for p in self._parameters.tensors.values())
        return (*versions, (0, self._optimizer_steps))

    def _watch_optimizers(self) -> None:
        """Count the steps of optimizers that have a parameter of the model: fused ones write to parameters without
        counting their versions. Nothing is kept alive by it."""
        watched = {id(parameter) for parameter in self._parameters.tensors.values()}
        myself = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            aligned = myself()
            if aligned is not None and any(id(p) in watched for g in optimizer.param_groups for p in g["params"]):
                aligned._optimizer_steps += 1

        self._unwatch = weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def _check_attached(self) -> None:
        if self._detached:
            raise UsageError("the model was detached from the artifact", hint="align it again")

    def load_weights(self) -> None:
        """Give the model the artifact's weights, rounded to the parameters' dtypes: those that a fresh engine has."""
        load_weights(self.artifact, self._parameters.program, self._parameters.tensors)

    def save_weights(self, path: str | os.PathLike[str]) -> Path:
        """Write the model's weights as the file that an engine of the artifact updates its own from
        (``Engine.update_weights``): packed, under the header of the artifact's weight file."""
        self._check_attached()
        self._sync_changed()
        return write_weights_file(self.artifact, self._replayer.plan.section, self._replayer.device.weights, Path(path))

    # -- the model ---------------------------------------------------------------------------------------

    def _attach(self) -> None:
        self.model.forward = self._forward

    def _detach(self) -> None:
        if vars(self.model).get("forward") is self._forward:
            del self.model.forward

    @contextmanager
    def own_forward(self) -> Iterator[nn.Module]:
        """The model with its own forward, as for comparing the two."""
        attached = vars(self.model).get("forward") is self._forward
        self._detach()
        try:
            yield self.model
        finally:
            if attached and not self._detached:
                self._attach()

    def detach(self) -> nn.Module:
        """Give the model its own forward back, and free what was allocated; returns the model."""
        if not self._detached:
            self._detached = True
            self._detach()
            self._unwatch()
            self._replayer.close()
        return self.model
