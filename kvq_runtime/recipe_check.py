"""Say what a recipe cannot be, in a sentence, and what to do instead."""

from typing import TYPE_CHECKING

from kvq_runtime.geometry import Geometry
from kvq_runtime.kinds import KINDS, ONLINE, SELECT, WINDOWS
from kvq_runtime.side import HALVES, Side
from kvq_runtime.stages import escape, exact, mixed, nuq, polar, predict, rotate, select

if TYPE_CHECKING:
    from kvq_runtime.recipe import Recipe


def check(recipe: "Recipe", geometry: Geometry | None = None) -> None:
    """Raise a ValueError that says what cannot be, and what to do."""
    if recipe.position not in ("pre", "post"):
        raise ValueError(f'{recipe.name}: position={recipe.position!r}; use "pre" or "post"')
    for side in recipe.sides:
        _check_side(recipe.name, side)
    if any(value.feedback for _, value in recipe.pairs):
        raise ValueError(f"{recipe.name}: queries say nothing of values; give feedback to keys alone")
    if recipe.position == "post" and any(key.feedback and key.feedback.queries != "after" for key, _ in recipe.pairs):
        raise ValueError(f'{recipe.name}: keys after RoPE meet queries after RoPE; use queries="after", or "pre"')
    if any(isinstance(pair[0].rotate, rotate.OutputBasis) for pair in recipe.pairs):
        raise ValueError(f"{recipe.name}: an output basis weighs values; give keys a plain basis")
    windows = {(pair[0].window, pair[1].window) for pair in recipe.pairs}
    if len(windows) > 1:
        raise ValueError(f"{recipe.name}: sinks, recent and block differ by layer; they belong to the whole recipe")
    if recipe.window is not None and not isinstance(recipe.window, tuple(WINDOWS.values())):
        raise ValueError(f"{recipe.name}: window={recipe.window!r}; use one of {sorted(WINDOWS)}, or None")
    if (recipe.chained or recipe.window) and recipe.key.window != recipe.value.window:
        raise ValueError(
            f"{recipe.name}: keys and values of a predicted recipe, or one with a dynamic window, are encoded "
            "together; give both the same "
            f"sinks, recent and block (given {recipe.key.window} and {recipe.value.window})"
        )
    if recipe.select is not None and not isinstance(recipe.select, tuple(SELECT.values())):
        raise ValueError(f"{recipe.name}: select={recipe.select!r}; use one of {sorted(SELECT)}, or none")
    if recipe.select is not None and recipe.window is not None:
        raise ValueError(f"{recipe.name}: tokens are selected behind a fixed window; drop select, or window")
    if isinstance(recipe.select, select.Heavy) and recipe.key.window != recipe.value.window:
        raise ValueError(f"{recipe.name}: tokens are held with key and value; give both the same window")
    if isinstance(recipe.select, select.Chunks):
        _check_chunks(recipe)
    if recipe.online is not None:
        _check_online(recipe)
    if geometry is not None:
        _check_geometry(recipe, geometry)


def _check_chunks(recipe: "Recipe") -> None:
    if any(side.block % recipe.select.chunk for side in recipe.sides):
        raise ValueError(f"{recipe.name}: chunks of {recipe.select.chunk} do not divide the blocks; use chunks that do")
    if recipe.chained or any(side.correct or side.axis != "token" for side in recipe.sides):
        raise ValueError(
            f"{recipe.name}: single tokens are decoded; use sides per token, with no prediction or mending"
        )
    if recipe.position == "post" and any(pair[0].predict for pair in recipe.pairs):
        raise ValueError(f"{recipe.name}: a mean after RoPE turns with each token; encode keys before RoPE")


def _check_online(recipe: "Recipe") -> None:
    if not isinstance(recipe.online, tuple(ONLINE.values())):
        raise ValueError(f"{recipe.name}: online={recipe.online!r}; use one of {sorted(ONLINE)}, or None")
    if not any(side.fitted for side in recipe.sides):
        raise ValueError(f"{recipe.name}: nothing is fitted; drop online")
    if recipe.window is not None or recipe.select is not None:
        raise ValueError(f"{recipe.name}: a choice of tokens does not wait for a fit; drop window, select, or online")
    for side in recipe.sides:
        if side.predict is not None and not isinstance(side.predict, predict.Mean):
            raise ValueError(f"{recipe.name}: {side.predict.kind} needs calibration; online use a mean, or nothing")
        if isinstance(side.correct, escape.Escape) or isinstance(side.rotate, rotate.OutputBasis):
            stage = side.correct or side.rotate
            raise ValueError(f"{recipe.name}: {stage.kind} needs calibration; drop it, or online")
        if side.fitted_quantizer and not isinstance(side.quantize, (mixed.Mixed, polar.PolarFitted)):
            raise ValueError(f"{recipe.name}: {side.quantize.kind} needs calibration; online use mixed or polar_fitted")
        if isinstance(side.quantize, mixed.Mixed) and side.quantize.target:
            raise ValueError(f"{recipe.name}: target={side.quantize.target} would differ by row; online give counts")
    if any(key.feedback and key.feedback.queries == "averaged" for key, _ in recipe.pairs):
        raise ValueError(f'{recipe.name}: queries are averaged over distances offline; use "before" or "after"')
    if recipe.position == "post" and any(key.predict for key, _ in recipe.pairs):
        raise ValueError(f'{recipe.name}: a mean of keys is fitted online before RoPE alone; use position "pre"')


def _check_side(name: str, side: Side) -> None:
    for setting, least in (("sinks", 0), ("recent", 0), ("block", 1)):
        given = getattr(side, setting)
        if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= 1 << 20:
            raise ValueError(f"{name}: {setting}={given!r}; use a whole number from {least} to {1 << 20}")
    if side.axis not in ("token", "channel"):
        raise ValueError(f'{name}: axis={side.axis!r}; use "token" or "channel"')
    if not isinstance(side.quantize, tuple(KINDS["quantize"].values())):
        raise ValueError(f"{name}: quantize={side.quantize!r}; use one of {sorted(KINDS['quantize'])}")
    if isinstance(side.quantize, exact.Exact) and (side.rotate or side.predict or side.axis != "token"):
        raise ValueError(f"{name}: exact keeps tokens as they are; drop predict, rotate and axis")
    if isinstance(side.quantize, mixed.Mixed) != isinstance(side.rotate, rotate.Basis):
        raise ValueError(f"{name}: a basis and mixed bits belong together; give both, or neither")
    if isinstance(side.quantize, mixed.Mixed) and (side.axis != "token" or side.block % 8):
        raise ValueError(f'{name}: mixed bits need axis "token" and a block of a multiple of 8 tokens')
    if isinstance(side.correct, escape.Escape) and (side.axis != "token" or side.block > 32767):
        raise ValueError(f'{name}: escape needs axis "token" and blocks below 32768')
    if side.correct is not None and isinstance(side.quantize, exact.Exact):
        raise ValueError(f"{name}: exact leaves nothing to correct; drop correct")
    if side.fitted_quantizer and side.axis != "token":
        raise ValueError(f'{name}: {side.quantize.kind} is fitted to tokens; use axis "token"')
    if isinstance(side.quantize, nuq.Nuq) and side.rotate:
        raise ValueError(f"{name}: nuq takes channels as they are; use it without rotate")
    if side.feedback is not None and isinstance(side.quantize, (exact.Exact, mixed.Mixed)):
        raise ValueError(f"{name}: feedback needs channels that are rounded in groups, not {side.quantize.kind}")


def _check_geometry(recipe: "Recipe", geometry: Geometry) -> None:
    beyond = [layer for layer in recipe.layers if not 0 <= layer < geometry.layers]
    if beyond:
        raise ValueError(f"{recipe.name}: settings for layers {beyond}, but the model has {geometry.layers}")
    for layer in range(geometry.layers):
        for half in HALVES:
            side = recipe.side(layer, half)
            width = geometry.width if side.axis == "token" else side.block
            try:
                side.quantize.order(width, geometry)
                if side.rotate is not None and not isinstance(side.rotate, rotate.Basis):
                    side.rotate.size(width, geometry)
                if side.feedback is not None:
                    side.feedback.check(side.axis, side.rotate, side.quantize, geometry)
                if side.correct is not None:
                    side.correct.fields(side.block, geometry)
            except ValueError as error:
                raise ValueError(f"{recipe.name}, layer {layer} {half}: {error}") from None
