// Products of digits (digits.h) by matrix tiles (AMX), for many tokens: the sums are exact, so that results are those of
// fewer tokens.

#pragma once

#include "amx.h"
#include "digits.h"

#if defined(NATIVE_AMX) && defined(__AMX_INT8__) && defined(NATIVE_INT8_DIGITS)
#define NATIVE_AMX_DIGITS

namespace NATIVE_ISA {

constexpr int64_t kFewestTileDigits = 12;  // tokens; fewer are faster without tiles
constexpr int64_t kTileWords = kTileRows * kPanelRows;
constexpr int64_t kDigitPanels = 4;  // panels that a tile of tokens passes at once
constexpr int64_t kDigitGroup = 32;  // panels that pass the same columns of tokens, which stay in the second-level cache
constexpr int64_t kDigitBlockColumns = 512;  // least columns that stay in the second-level cache while tokens pass

template <int Sums, int Inputs, int Weights>
inline NATIVE_INLINE void multiply_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Inputs), "i"(Weights));
}

// Tokens packed as digits: each tile as [blocks, parts, kDigits, rows, 16], a part being 16 chunks, and its blocks as
// [blocks, rows].
template <typename WeightFormat>
class TileDigits : public TileTokens {
 public:
  using Format = WeightFormat;
  using Block = DigitBlock<Format::kDigits>;

  static int64_t num_parts(const DigitGroups<Format>& groups) {
    return (groups.words_of(0) * Format::kChunks + kTileRows - 1) / kTileRows;
  }
  static int64_t size(const LinearProblem& p) {
    const DigitGroups<Format> groups(p);
    constexpr int kDigits = Format::kDigits;
    const int64_t block_words = num_parts(groups) * kDigits * kTileRows + int64_t{sizeof(Block) / sizeof(int32_t)};
    return p.num_tokens * groups.num_blocks() * block_words + kTileRows;
  }

  TileDigits(Executor& executor, const LinearProblem& p, float* buffer)
      : TileTokens(p), groups_(p), parts_(num_parts(groups_)), digits_(aligned<int32_t>(buffer)) {
    blocks_ = reinterpret_cast<Block*>(digits_ + p.num_tokens * groups_.num_blocks() * row_words());
    pack_all(executor, [&](int64_t tile) { pack(tile); });
  }

  // Packed tokens are more bytes than weights: few tokens and many panels.
  static int64_t task_tokens(const LinearProblem&) { return 128; }
  int64_t panels_at_once() const { return kDigitPanels; }
  int64_t parts() const { return parts_; }

  const int32_t* digits(int64_t tile, int64_t block) const {
    return digits_ + (tile * kTileRows * groups_.num_blocks() + block * rows(tile)) * row_words();
  }
  const Block* blocks(int64_t tile, int64_t block) const {
    return blocks_ + tile * kTileRows * groups_.num_blocks() + block * rows(tile);
  }

 private:
  int64_t row_words() const { return parts_ * Format::kDigits * kTileRows; }

  void pack(int64_t tile) const {
    struct Prepared;
    float* buffer = scratch<Prepared>(p_.num_inputs);
    struct Chunks;
    constexpr int D = Format::kDigits, kWords = kChunkWords<D>;
    auto* chunks = reinterpret_cast<int32_t*>(scratch<Chunks>(groups_.words_of(0) * Format::kChunks * kWords));
    const int64_t num_rows = rows(tile);
    for (int64_t t = 0; t < num_rows; ++t) {
      const float* x = prepare(p_, tile * kTileRows + t, buffer);
      for (int64_t block = 0; block < groups_.num_blocks(); ++block) {
        const int64_t index = block % groups_.blocks, first = index * groups_.block_columns();
        const int64_t size = std::min(groups_.block_columns(), p_.group_size - first);
        const int64_t num_chunks = groups_.words_of(index) * Format::kChunks;
        Block& to = const_cast<Block&>(blocks(tile, block)[t]);
        write_digits<Format>(x + block / groups_.blocks * p_.group_size + first, size, num_chunks, chunks, kWords, to);
        auto* row = const_cast<int32_t*>(digits(tile, block)) + t * kTileRows;
        for (int64_t part = 0; part < parts_; ++part) {
          for (int d = 0; d < D; ++d, row += num_rows * kTileRows) {
            for (int64_t c = 0; c < kTileRows; ++c) {
              const int64_t chunk = part * kTileRows + c;
              row[c] = chunk < num_chunks ? chunks[chunk * kWords + d] : 0;
            }
          }
        }
      }
    }
  }

  DigitGroups<Format> groups_;
  int64_t parts_;
  int32_t* digits_;
  Block* blocks_;
};

// Write the words of a block of a panel as tiles of bytes; rows past the last meet digits that are zeros.
template <typename Format>
inline void write_byte_tiles(const uint32_t* from, int64_t num_words, uint32_t* to) {
  for (int64_t i = 0; i < num_words; ++i, from += kPanelRows) {
    prefetch<kVectors>(from, 0);
    const I<16> words = load_words<16>(from);
    for (int c = 0; c < Format::kChunks; ++c, to += kPanelRows) {
      const I<16> bytes = Format::bytes(words, c);
      std::memcpy(to, &bytes, sizeof(bytes));
    }
  }
}

// Add the products of a tile of tokens with blocks [first, end) of a panel to sums [rows, 16].
template <typename Format>
void multiply_digit_tile(const LinearProblem& p, const TileDigits<Format>& tokens, const DigitGroups<Format>& groups,
                         int64_t tile, int64_t panel, int64_t first, int64_t end, const uint32_t* bytes, float* sums) {
  constexpr int kDigits = Format::kDigits;
  const int64_t num_rows = tokens.rows(tile), parts = tokens.parts();
  alignas(kLineBytes) int32_t products[kDigits][kTileRows][kPanelRows];
  for (int64_t block = first; block < end; ++block, bytes += parts * kTileWords) {
    const int32_t* digits = tokens.digits(tile, block);
    each_constant<kDigits>([&](auto d) NATIVE_INLINE { zero_tile<d>(); });
    for (int64_t part = 0; part < parts; ++part, digits += kDigits * num_rows * kTileRows) {
      load_tile<7>(bytes + part * kTileWords, kRowBytes);
      each_constant<kDigits>([&](auto d) NATIVE_INLINE {
        load_tile<4 + d>(digits + d * num_rows * kTileRows, kRowBytes);
        multiply_bytes<d, 4 + d, 7>();
      });
    }
    each_constant<kDigits>([&](auto d) NATIVE_INLINE { store_tile<d>(products[d], kRowBytes); });
    const GroupScales<1> scales(p, p.zeros != nullptr, groups.num_groups, panel, block / groups.blocks);
    const DigitBlock<kDigits>* of_token = tokens.blocks(tile, block);
    for (int64_t t = 0; t < num_rows; ++t) {
      I<16> parts_of[kDigits];
      for (int d = 0; d < kDigits; ++d) {
        std::memcpy(&parts_of[d], products[d][t], sizeof(parts_of[d]));
        parts_of[d] += of_token[t].starts[d];
      }
      F<16> sum = block_sums<Format>(parts_of, of_token[t]);
      if (p.zeros) {
        sum = fma<16>(all<16>(-of_token[t].sum), scales.zeros[0] - static_cast<float>(Format::kZero), sum);
      }
      store<16>(sums + t * kPanelRows, fma<16>(scales.scales[0], sum, load<16>(sums + t * kPanelRows)));
    }
  }
}

// Multiply some tiles of tokens with a range of panels. Blocks of some panels and the sums stay in the second-level cache
// while all tokens pass.
template <typename Format>
void multiply_blocks(const LinearProblem& p, const TileDigits<Format>& tokens, int64_t first_tile, int64_t end_tile,
                     int64_t first_panel, int64_t end_panel) {
  const DigitGroups<Format> groups(p);
  const int64_t K = p.num_inputs, num_tiles = end_tile - first_tile, parts = tokens.parts();
  const int64_t step_groups = std::clamp<int64_t>(kDigitBlockColumns / p.group_size, 1, groups.num_groups);
  const int64_t step_blocks = step_groups * groups.blocks, panel_tiles = step_blocks * parts * kTileWords;
  struct Sums;
  float* sums = aligned<float>(scratch<Sums>(kDigitGroup * num_tiles * kTileSums + kLineBytes));
  struct Converted;
  auto* converted = aligned<uint32_t>(scratch<Converted>(kDigitPanels * panel_tiles + kLineBytes));
  const auto* weights = static_cast<const uint32_t*>(p.weight);
  TileShapes shapes;
  const int64_t columns = step_groups * p.group_size;
  each_block(first_panel, end_panel, kDigitGroup, kDigitPanels, K, columns, [&](const PanelBlock& here, const PanelBlock&) {
    const int64_t group = here.column / p.group_size, first = group * groups.blocks;
    const int64_t end = (here.column + here.num_columns) / p.group_size * groups.blocks;
    for (int64_t i = 0; i < here.num_panels; ++i) {
      const uint32_t* from = weights + ((here.panel + i) * groups.num_words() + group * groups.words) * kPanelRows;
      uint32_t* to = converted + i * panel_tiles;
      for (int64_t block = first; block < end; ++block, to += parts * kTileWords) {
        const int64_t num_words = groups.words_of(block % groups.blocks);
        write_byte_tiles<Format>(from, num_words, to);
        from += num_words * kPanelRows;
      }
    }
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
      const int64_t rows = tokens.rows(tile);
      shapes.set({rows, rows, rows, rows, rows, rows, rows, kTileRows});
      for (int64_t i = 0; i < here.num_panels; ++i) {
        const int64_t panel = here.panel + i, slot = (panel - first_panel) % kDigitGroup;
        float* kept = sums + (slot * num_tiles + tile - first_tile) * kTileSums;
        if (here.column == 0) std::fill_n(kept, kTileSums, 0.0f);
        multiply_digit_tile<Format>(p, tokens, groups, tile, panel, first, end, converted + i * panel_tiles, kept);
        if (here.column + here.num_columns == K) finish_tile(p, tile * kTileRows, tokens.rows(tile), panel, 1, kept);
      }
    }
  });
}

template <typename Format>
void multiply_panels(const LinearProblem& p, const TileDigits<Format>& tokens, int64_t panel, int64_t end_panel) {
  multiply_blocks(p, tokens, 0, 1, panel, end_panel);
}

}  // namespace NATIVE_ISA

#endif
