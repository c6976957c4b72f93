"""Gated latent attention in a single launch: its kinds of phases, and a layer that has them in the place of KDA's.

kernels_cu/launch_heads.cuh and launch_mla.cuh run them.
"""
from dataclasses import dataclass, field, replace

from .config import K3Config
from .errors import PlanError
from .launch_kinds import MAX_TOKENS, VECTOR, Field, Kind, Product
from .launch_rank import own_tiles, product
from .packing import inputs_leaves_and_steps
from .phases import MIX_SLICES, TILE_ROWS, Grid
from .weights import padded_dims, tree_leaves

SLAB = 32                   # latent values of a team that combines: kMlaSlab
CACHES = {1: ("MlaE4m3", "u8"), 2: ("MlaBf16", "bf16")}   # bytes of a cached value -> C++ types
# Pieces of 16 cache rows in shared memory: two pages, so that one is scored while the other is weighed, where the ring has slots for that and
# some more; of BF16 never, and in steps of more rows, whose sums need room, a page alone.
PIECES = {1: 8, 2: 5}
PAGE_PIECES, PAGE_ROWS = 4, 4


@dataclass(frozen=True)
class NormedProduct(Product):
    """A product of F32 rows that every block norms for itself; the norm's weights are the next phase's."""

    def read_bytes(self, source: Field, rows: int) -> int:
        return source.nbytes * rows

    def input_type(self, most: int) -> str:
        return f"LaunchQueryNorm<{self.inputs}, {tree_leaves(self.inputs)}>"


@dataclass(frozen=True)
class HeadProduct(Product):
    """A matrix a head, of `tiles` tiles in all. rope: values behind each head's inputs that go on behind its results. gated: results are multiplied with the
    sigmoid of the second field that it reads."""

    heads: int = field(kw_only=True)
    rope: int = field(default=0, kw_only=True)
    gated: bool = field(default=False, kw_only=True)

    @property
    def head_tiles(self) -> int:
        return self.tiles // self.heads

    def read_bytes(self, source: Field, rows: int) -> int:
        if self.reads.index(source.name) == 1:
            return TILE_ROWS * 4 * rows
        return (self.inputs + self.rope) * 2 * rows

    def input_type(self, most: int) -> str:
        return f"LaunchHeads<{self.head_tiles}, {self.rope // VECTOR}, {most}>"

    def output_type(self) -> str:
        return f"LaunchHeadOut<{self.head_tiles}, {self.rope // VECTOR}>"

    def add_type(self, most: int) -> str:
        return f"LaunchGate<{most}>" if self.gated else "LaunchNothing"


@dataclass(frozen=True)
class MlaNorm(Kind):
    """A row's new latent and shared key into the cache. Leaves a vector a row, which says that they are there."""

    latent: int
    rope: int
    cache: int   # bytes of a cached value
    home = MAX_TOKENS * MIX_SLICES   # as KDA's

    def units(self, grid: Grid, rows: int) -> tuple[int, ...]:
        return (0,) * rows

    def kind(self, copy: int, most: int) -> str:
        return f"LaunchMlaNorm<{CACHES[self.cache][1]}, {self.latent}, {tree_leaves(self.latent)}, {self.rope}>"


@dataclass(frozen=True)
class MlaAttend(Kind):
    """Attention of all rows and heads over the cache: every block has a unit, and takes items of the step as the rows' positions make them. Partial
    results lie in memory; each block leaves a vector, which says that its own are there."""

    heads: int
    latent: int
    rope: int
    cache: int
    rows: int
    home = 0

    def kind(self, copy: int, most: int) -> str:
        tiles = 1 if self.rows * self.heads <= 8 else 2   # more queries of a group would take more registers than a thread has
        pieces = PAGE_PIECES if self.cache == 2 and self.rows > PAGE_ROWS else PIECES[self.cache]
        return f"LaunchMlaAttend<LaunchMlaShape<{CACHES[self.cache][0]}, {self.heads}, {self.latent}, {self.rope}, {tiles}, {pieces}>, {copy}>"


@dataclass(frozen=True)
class MlaCombine(Kind):
    """Partial results of a row and head added up, some slabs of latent values a unit. Right behind the MlaAttend `attend`."""

    attend: MlaAttend

    @property
    def slabs(self) -> int:
        return 2 if self.attend.rows > 4 else 1   # mla_combine_slabs

    def units(self, grid: Grid, rows: int) -> tuple[int, ...]:
        return (0,) * (rows * self.attend.heads * (self.attend.latent // SLAB // self.slabs))

    def read_bytes(self, source: Field, rows: int) -> int:
        return source.nbytes

    def kind(self, copy: int, most: int) -> str:
        if self.attend.latent % (SLAB * self.slabs):
            raise PlanError(f"{self.name} has {self.attend.latent} latent values; wanted a multiple of {SLAB * self.slabs}")
        return f"LaunchMlaCombine<{self.attend.kind(copy, 1)}, {self.slabs}>"


def mla_kinds(cfg: K3Config, tp: int, cluster: int, *, rows: int, cache: int, blocks: int) -> tuple[Kind, ...]:
    """From mla_in to mla_out, of one rank.

    Args:
        rows: of a step. cache: bytes of a cached value, 1 or 2. blocks: of the launch.
    """
    dims = padded_dims(cfg.dims(), tp)
    heads, nope, rope, latent, value = dims["num_attention_heads"] // tp, *(dims[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim"))
    query_tiles, cache_tiles, gate_tiles = own_tiles(cfg, tp, "mla_q_a_proj mla_kv_a_proj mla_g_proj")
    gathered = lambda name, n: Field(name, "f32", n // tp, n)
    own = lambda name, dtype, n: Field(name, dtype, n, n)
    attend = MlaAttend("mla_attend", heads, latent, rope, cache, rows, reads=("mla_q_absorbed", "mla_written"), fields=(own("mla_attended", "f32", 4 * blocks),))
    mla_q = product(cfg, tp, cluster, "mla_q")
    return (
        product(cfg, tp, cluster, "mla_in", reads=("attn_in",), firsts=(0, query_tiles, query_tiles + cache_tiles),
                fields=(gathered("mla_q_a", dims["q_lora_rank"]), gathered("mla_kv_a", latent + rope), own("mla_out_gate", "f32", gate_tiles * TILE_ROWS))),
        NormedProduct("mla_q", mla_q.tiles, mla_q.leaves, mla_q.steps, mla_q.parts, reads=("mla_q_a",), fields=(own("mla_q", "bf16", heads * (nope + rope)),)),
        MlaNorm("mla_norm", latent, rope, cache, reads=("mla_kv_a",), fields=(own("mla_written", "f32", 4),)),
        HeadProduct("mla_absorb", heads * (latent // TILE_ROWS), *inputs_leaves_and_steps(nope), heads=heads, rope=rope, reads=("mla_q",),
                    fields=(own("mla_q_absorbed", "bf16", heads * (latent + rope)),)),
        attend,
        MlaCombine("mla_combine", attend, reads=("mla_attended",), fields=(own("mla_o_latent", "bf16", heads * latent),)),
        HeadProduct("mla_out", heads * (value // TILE_ROWS), *inputs_leaves_and_steps(latent), heads=heads, gated=True, reads=("mla_o_latent", "mla_out_gate"),
                    fields=(own("mixer_out", "bf16", heads * value),)),
    )


def both_kinds(layer: tuple[Kind, ...], kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """Kinds for layers of either sort: `layer`, KDA's, with those of latent attention beside KDA's."""
    at = {k.name: i for i, k in enumerate(layer)}
    first, last = at["kda_in"] + 1, at["kda_mix"] + 1
    return (*layer[:first], _reads_as(layer[first - 1], kinds[0]), *layer[first:last], *kinds[1:], *layer[last:])


def of_its_sort(cfg: K3Config, kinds: tuple[Kind, ...]):
    """`has` of layer_steps for both_kinds: what makes mixer_out from attn_in differs from layer to layer."""
    of_mla = {k.name for k in kinds}
    return lambda k, layer: k.name not in ({"kda_in", "kda_mix"} if not cfg.is_kda(layer) else of_mla)


def in_place_of_kda(layer: tuple[Kind, ...], kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """A layer with other kinds from its input to mixer_out: what runs while kda_in's results are on their way now runs while those of the first one are."""
    at = {k.name: i for i, k in enumerate(layer)}
    first, last = at["kda_in"], at["kda_mix"]
    return (*layer[:first], _reads_as(layer[first], kinds[0]), *layer[first + 1:last], *kinds[1:], *layer[last + 1:])


def _reads_as(kda_in: Product, mla_in: Product) -> Product:
    """Both read the layer's first mix, and norm for themselves where one does."""
    return replace(mla_in, reads=kda_in.reads, norm=kda_in.norm)
