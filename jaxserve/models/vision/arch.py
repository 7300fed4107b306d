"""VisionArch: a vision tower's sizes and switches, the same for all families."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxserve.errors import ConfigError
from jaxserve.images.layouts import TiledLayout
from jaxserve.images.prepared import PreparedImage
from jaxserve.layers.sharding import TENSOR

BUCKETS = (256, 1024, 4096, 16384)  # patches per program, if grids differ from image to image


@dataclass(frozen=True)
class VisionArch:
    """A vision tower: encoder layers over patches, and the projector to the decoder's embeddings.

    Sizes are the whole tower's; `local` returns one device's.

    Attributes:
        encoder: the encoder's name in `tower.ENCODERS`.
        projector: the projector's name in `tower.PROJECTORS`.
        hidden_size: elements of a hidden state.
        num_layers: encoder layers that are computed.
        num_stored_layers: encoder layers in checkpoints; the projector may read hidden states before the last ones.
        num_heads: attention heads.
        head_dim: elements per head.
        ffn_size: elements between an MLP's matrices.
        out_size: the decoder's hidden size.
        patch_shape: channels, perhaps frames, pixel rows and columns.
        activation: MLP activation, see `layers.mlp.activation_function`.
        norm_eps: the norms' epsilon.
        grid: patch rows and columns in each image; None if these differ.
        class_tokens: tokens before the patches of an image, in encoders with a fixed grid.
        keeps_class: True if class tokens have embeddings, too.
        feature_layers: hidden states that the projector reads, each by the index of the layer after it.
        num_features: vectors per embedding, which the decoder's first layers add with DeepStack; 1 without.
        tiles: layout of images in tiles; None without.
        max_tiles: maximum number of tiles per image.
        merge_size: patch rows, and columns, that share an embedding.
        rope_theta: 2-D RoPE base; None without RoPE.
        window: embedding rows, and columns, in a window; None if layers attend to whole images.
        full_layers: layers that attend to whole images, if others have windows.
        position_side: rows, and columns, in the grid of learned position embeddings; None without.
        has_final_norm: True if the projector reads normed hidden states.
        is_clipped: True if matrices have bounds for their inputs and outputs.
        is_standardized: True if pooled hidden states are shifted and scaled.
        projector_activation: the projector's activation.
        projector_bias: True if the projector's matrices have biases.
        projector_eps: epsilon of the projector's norm.
        num_devices: devices that divide the tower.
        tensor_axis: mesh axes that divide the tower, if sizes are one device's.
    """

    encoder: str
    projector: str
    hidden_size: int
    num_layers: int
    num_stored_layers: int
    num_heads: int
    head_dim: int
    ffn_size: int
    out_size: int
    patch_shape: tuple[int, ...]
    activation: str
    norm_eps: float
    grid: tuple[int, int] | None = None
    class_tokens: int = 0
    keeps_class: bool = False
    feature_layers: tuple[int, ...] = ()
    num_features: int = 1
    tiles: TiledLayout | None = None
    max_tiles: int = 1
    merge_size: int = 1
    rope_theta: float | None = None
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    position_side: int | None = None
    has_final_norm: bool = False
    is_clipped: bool = False
    is_standardized: bool = False
    projector_activation: str = "gelu"
    projector_bias: bool = True
    projector_eps: float = 1e-6
    num_devices: int = 1
    tensor_axis: tuple[str, ...] | None = None

    @property
    def patch_size(self) -> int:
        """Values per patch, S."""
        size = 1
        for dim in self.patch_shape:
            size *= dim
        return size

    @property
    def row_size(self) -> int:
        """Elements per embedding, with the features that DeepStack adds."""
        return self.out_size * self.num_features

    @property
    def is_split(self) -> bool:
        """True if devices divide heads and MLPs; otherwise each computes the whole tower."""
        n = self.num_devices
        return n > 1 and not (self.num_heads % n or self.ffn_size % n or self.out_size % n)

    def axis(self, name: str) -> str | None:
        """Return a logical axis, for heads or MLPs; None if devices do not divide them."""
        return name if self.is_split or self.num_devices == 1 else None

    @property
    def out_axis(self) -> str | None:
        """Logical axis between the projector's matrices."""
        return self.axis("ffn")

    @property
    def is_windowed(self) -> tuple[bool, ...]:
        """For each layer, True if it attends to windows."""
        return tuple(self.window is not None and index not in self.full_layers for index in range(self.num_layers))

    @property
    def period(self) -> int:
        """Number of layers after which the pattern in `is_windowed` repeats."""
        kinds = self.is_windowed
        return next((p for p in range(1, len(kinds)) if kinds[p:] == kinds[:-p]), len(kinds))

    def divided(self, num_devices: int) -> VisionArch:
        """Return the tower divided among devices, which each have all of it if they do not divide its sizes."""
        return dataclasses.replace(self, num_devices=num_devices)

    def local(self) -> VisionArch:
        """Return one device's sizes."""
        if not self.is_split:
            return dataclasses.replace(self, num_devices=1)
        heads, ffn_size = self.num_heads // self.num_devices, self.ffn_size // self.num_devices
        return dataclasses.replace(self, num_heads=heads, ffn_size=ffn_size, num_devices=1, tensor_axis=TENSOR)

    def num_embeddings(self, grid: tuple[int, int]) -> int:
        """Return how many embeddings an image has, given its patch rows and columns."""
        rows, columns = grid
        return (rows // self.merge_size) * (columns // self.merge_size) + (self.class_tokens if self.keeps_class else 0)

    def misfit(self, image: PreparedImage) -> str | None:
        """Return why the tower cannot take a prepared image, such as one for another model; None if it can."""
        (num_patches, patch_size), grid, block = image.patches.shape, image.grid, self.merge_size
        if num_patches > self.buckets[-1]:
            return f"an image must have at most {self.buckets[-1]} patches, got {num_patches}; reduce it"
        is_grid = min(grid) > 0 and (not any(side % block for side in grid) if self.grid is None else grid == self.grid)
        if not is_grid or patch_size != self.patch_size or num_patches != grid[0] * grid[1] * self._num_tiles(image):
            return (
                f"an image must be prepared for this model, with {self.patch_size} values per patch and the patch grid "
                f"{self.grid or f'of any multiple of {block}'}, got {num_patches} patches of {patch_size} values, "
                f"{grid} per tile"
            )
        counted = self.num_embeddings(grid) if self.tiles is None else self.tiles.num_embeddings(grid, image.size)
        if counted != image.num_embeddings:
            return f"an image with the patch grid {grid} must have {counted} embeddings, got {image.num_embeddings}"
        return None

    def _num_tiles(self, image: PreparedImage) -> int:
        """Return how many tiles an image must have; 0 if its size is not known."""
        if self.tiles is None:
            return 1
        if not min(image.size):
            return 0
        rows, columns = self.tiles.best(image.size)
        return 1 + rows * columns // self.tiles.tile_size**2

    @property
    def buckets(self) -> tuple[int, ...]:
        """Patches per compiled program, which encodes one image.

        If grids differ, at most three in four patches are padding, as each bucket is four times as large as the one
        before it; more in the first.
        """
        if self.grid is None:
            return BUCKETS
        size = self.grid[0] * self.grid[1]
        if self.tiles is not None:  # an image has two tiles or more
            return tuple(sorted({size * min(tiles, self.max_tiles) for tiles in (2, 8, self.max_tiles)}))
        return (size,)

    def bucket(self, num_patches: int) -> int:
        """Return the smallest bucket for `num_patches` patches; ConfigError if none is large enough."""
        for size in self.buckets:
            if num_patches <= size:
                return size
        raise ConfigError(f"images encoded together must have at most {self.buckets[-1]} patches, got {num_patches}")

    def max_embeddings(self, num_patches: int) -> int:
        """Return how many embeddings a program for `num_patches` patches returns."""
        if self.grid is None:
            return num_patches // self.merge_size**2
        num_tiles = num_patches // (self.grid[0] * self.grid[1])
        ends = 0 if self.tiles is None else self.grid[0]  # each row of a tile may end in an embedding
        return num_tiles * (self.num_embeddings(self.grid) + ends)
