"""Products and experts of one rank as kinds of phases, and chains of them without what lies between."""
from . import packing
from .config import K3Config
from .launch_kinds import ExpertDown, ExpertUp, ForcedChoice, Kind, Product, linked
from .packing import leaves_and_steps
from .phases import TILE_ROWS
from .weights import BY_NAME, TREE_LEAVES, rank_shape


def own_tiles(cfg: K3Config, tp: int, names: str) -> list[int]:
    """Tiles of 16 rows of each of some joined matrices, on one rank."""
    return [-(-rank_shape(BY_NAME[name], cfg.dims(), tp)[0] // TILE_ROWS) for name in names.split()]


def parts_of(leaves: int, cluster: int) -> int:
    """Blocks that share a unit: of fewer than all leaves of a tree a block has more groups of warps at work than a cluster has inboxes."""
    return cluster if leaves == TREE_LEAVES else 1


def product(cfg: K3Config, tp: int, cluster: int, name: str, **more) -> Product:
    """The product of a stage (or of shared_down), on one rank."""
    names = " ".join(next(p for p in packing.PACKED["route" if name == "shared_down" else name] if p.how in (packing.TILES, packing.PAIRS)).sources)
    leaves, steps = leaves_and_steps(names.split()[-1], cfg, tp)
    return Product(name, sum(own_tiles(cfg, tp, names)), leaves, steps, parts_of(leaves, cluster), **more)


def dense_products(cfg: K3Config, tp: int, cluster: int = 1) -> tuple[Kind, ...]:
    """The BF16 products of a rank's KDA and MoE layer that all rows go through one after the other."""
    return linked(tuple(product(cfg, tp, cluster, name) for name in ("kda_in", "o_proj", "moe_in", "latent_up")))


def experts(cfg: K3Config, tp: int, cluster: int) -> tuple[ExpertUp, ExpertDown]:
    """w1 and w3, and w2, of a rank."""
    leaves, groups = leaves_and_steps("expert_w1", cfg, tp)
    return (ExpertUp("expert_up", own_tiles(cfg, tp, "expert_w1")[0], leaves, groups, parts_of(leaves, cluster)),
            ExpertDown("moe_down", own_tiles(cfg, tp, "expert_w2")[0], *leaves_and_steps("expert_w2", cfg, tp)))


def with_experts(cfg: K3Config, tp: int, cluster: int) -> tuple[Kind, ...]:
    """The dense products, and the routed experts where they belong, chosen beforehand."""
    kda_in, o_proj, moe_in, latent_up = dense_products(cfg, tp, cluster)
    return linked((kda_in, o_proj, moe_in, ForcedChoice("choice", cfg.num_experts), *experts(cfg, tp, cluster), latent_up))
