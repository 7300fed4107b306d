// Products of bfloat16 weights by matrix tiles (AMX): an instruction adds 16 x 16 sums of 32 products each.
//
// An input of 24 bits is the sum of three bfloat16 terms of 8 bits, so that products are those of floats: each term is
// multiplied with the weights, and all are added to the same sums. An input rounded to bfloat16 is one term. A row of a
// tile, i.e. a token, meets the same instructions however many rows there are. An input that is not finite makes its
// token's outputs NaN.

#pragma once

#include <type_traits>
#include <utility>

#include "floats.h"

#if defined(__AMX_BF16__) && NATIVE_WIDTH == 16
#define NATIVE_AMX

namespace NATIVE_ISA {

constexpr int64_t kTileRows = 16;     // tokens, or pairs of columns of weights
constexpr int64_t kTileColumns = 32;  // bfloat16 in a row: columns that one instruction multiplies
constexpr int64_t kTileNumbers = kTileRows * kTileColumns;
constexpr int64_t kRowBytes = kTileColumns * sizeof(BFloat16);
constexpr int64_t kTileSums = kTileRows * kPanelRows;
constexpr int kTilePanels = 2;          // panels, and tiles of tokens, that are multiplied at once
constexpr int64_t kTaskTokens = 512;  // tokens that pass the same weights
constexpr int64_t kTermBytes = 5 << 18;  // bytes of their terms that stay in the second-level cache while panels pass
constexpr int64_t kNearBytes = 1536, kFarBytes = 6144;  // how far ahead weights are fetched to each level of caches

template <int Tile>
inline NATIVE_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

template <int Tile>
inline NATIVE_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
inline NATIVE_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}

template <int Sums, int Inputs, int Weights>
inline NATIVE_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Inputs), "i"(Weights));
}

// The shapes of a core's tiles. Released when they go.
class TileShapes {
 public:
  using Rows = std::array<int64_t, 8>;  // of each tile

  TileShapes() = default;
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
  ~TileShapes() { asm volatile("tilerelease"); }

  void set(const Rows& rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (size_t i = 0; i < rows.size(); ++i) {
      shapes.row_bytes[i] = kRowBytes;
      shapes.rows[i] = static_cast<uint8_t>(rows[i]);
    }
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }

 private:
  Rows rows_ = {};
};

// Tokens of a product in tiles of 16, the last may have fewer.
class TileTokens {
 public:
  int64_t num_tiles() const { return (p_.num_tokens + kTileRows - 1) / kTileRows; }
  int64_t first_token(int64_t tile) const { return std::min(tile * kTileRows, p_.num_tokens); }
  int64_t rows(int64_t tile) const { return std::min(p_.num_tokens - tile * kTileRows, kTileRows); }

 protected:
  explicit TileTokens(const LinearProblem& p) : p_(p) {}

  // Call pack(tile) for all tiles, on several threads if there are many inputs.
  template <typename Pack>
  void pack_all(Executor& executor, const Pack& pack) const {
    Tiles(p_.num_tokens, kTileRows).pack_all(executor, p_.num_inputs, pack);
  }

  const LinearProblem& p_;
};

template <typename Number>
inline Number* aligned(void* buffer) {
  return reinterpret_cast<Number*>((reinterpret_cast<uintptr_t>(buffer) + kLineBytes - 1) / kLineBytes * kLineBytes);
}

// Terms of a tile of tokens, [chunks, Terms, rows, 32].
template <int Terms>
struct TermTile {
  const uint16_t* terms;
  int64_t num_rows;

  const uint16_t* at(int64_t chunk, int64_t term) const {
    return terms + (chunk * Terms + term) * num_rows * kTileColumns;
  }
};

// Tokens packed as terms, tile after tile. Many tokens with many columns pass the weights in parts: the terms of a part's
// columns stay in the second-level cache while panels pass, and all sums wait in memory between the parts.
template <int Terms>
class TermTokens : public TileTokens {
 public:
  using Format = Floats<BFloat16>;

  static int64_t num_chunks(const LinearProblem& p) { return (p.num_inputs + kTileColumns - 1) / kTileColumns; }
  static int64_t num_parts(const LinearProblem& p) {
    const int64_t column_bytes = std::min(p.num_tokens, kTaskTokens) * Terms * int64_t{sizeof(BFloat16)};
    return (p.num_inputs * column_bytes + kTermBytes - 1) / kTermBytes;
  }
  static int64_t size(const LinearProblem& p) {  // and two lines to align terms and sums
    const int64_t num_tiles = (p.num_tokens + kTileRows - 1) / kTileRows;
    const int64_t num_sums = num_parts(p) > 1 ? num_tiles * num_panels(p) * kTileSums : 0;
    return (p.num_tokens * num_chunks(p) * Terms * kTileColumns) / 2 + num_sums + kTileColumns;
  }

  TermTokens(Executor& executor, const LinearProblem& p, float* buffer)
      : TileTokens(p), num_chunks_(num_chunks(p)), terms_(aligned<uint16_t>(buffer)) {
    sums_ = aligned<float>(terms_ + p.num_tokens * num_chunks_ * Terms * kTileColumns);
    pack_all(executor, [&](int64_t tile) { pack(tile); });
  }

  static int64_t task_tokens(const LinearProblem&) { return kTaskTokens; }
  int64_t panels_at_once() const { return kTilePanels; }
  int64_t num_parts() const { return num_parts(p_); }
  // Return the first chunk of a part.
  int64_t start(int64_t part) const { return part * num_chunks_ / num_parts(); }

  TermTile<Terms> tile(int64_t index) const {
    return {terms_ + index * kTileRows * num_chunks_ * Terms * kTileColumns, rows(index)};
  }
  // Return the sums of a tile of tokens with a panel.
  float* sums(int64_t tile, int64_t panel) const { return sums_ + (tile * num_panels(p_) + panel) * kTileSums; }

 private:
  void pack(int64_t tile) const {
    const int64_t num_rows = rows(tile), K = p_.num_inputs;
    uint16_t* to = const_cast<uint16_t*>(this->tile(tile).terms);
    const bool is_narrow = Terms == 1 && p_.x.is_bfloat16 && !p_.norm;
    struct Prepared;
    float* buffer = scratch<Prepared>(is_narrow ? 0 : num_rows * K);
    for (int64_t t = 0; t < num_rows; ++t, to += kTileColumns) {
      const int64_t token = tile * kTileRows + t, stride = Terms * num_rows * kTileColumns;
      if (is_narrow) {
        copy(static_cast<const BFloat16*>(p_.x.data) + (p_.rows ? p_.rows[token] : token) * K, to, stride);
      } else {
        write_terms(prepare(p_, token, buffer + t * K), to, num_rows, stride);
      }
    }
  }

  // Write a token's inputs, chunks `stride` elements apart.
  void copy(const BFloat16* from, uint16_t* to, int64_t stride) const {
    for (int64_t k = 0; k < p_.num_inputs; k += kTileColumns, to += stride) {
      const int64_t left = p_.num_inputs - k;
      const __mmask32 mask = left >= kTileColumns ? ~0u : (1u << left) - 1;
      _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(mask, from + k));
    }
  }

  // Write the terms of a token's inputs, chunks `stride` elements apart and a chunk's terms after each other.
  void write_terms(const float* from, uint16_t* to, int64_t num_rows, int64_t stride) const {
    const int64_t K = p_.num_inputs;
    for (int64_t k = 0; k < K; k += kTileColumns, to += stride) {
      F<16> low = load_some<16>(from + k, K - k);
      F<16> high = k + 16 < K ? load_some<16>(from + k + 16, K - k - 16) : F<16>{};
      for (int64_t term = 0; term < Terms; ++term) {
        const I<16> low_bits = bits_of<I<16>>(low) & kTermBits, high_bits = bits_of<I<16>>(high) & kTermBits;
        _mm512_storeu_si512(to + term * num_rows * kTileColumns, upper_halves(low_bits, high_bits));
        low -= bits_of<F<16>>(low_bits);
        high -= bits_of<F<16>>(high_bits);
      }
    }
  }

  static __m512i upper_halves(const I<16>& low, const I<16>& high) {
    const __m512i low_halves = _mm512_srli_epi32((__m512i)low, 16), high_halves = _mm512_srli_epi32((__m512i)high, 16);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low_halves)),
                              _mm512_cvtepi32_epi16(high_halves), 1);
  }

  static constexpr int32_t kTermBits = -(1 << 16);

  int64_t num_chunks_;
  uint16_t* terms_;
  float* sums_;
};

// Write two rows of 16 elements as a row of a tile, [16, 2].
inline NATIVE_INLINE void interleave(const __m512i& rows, void* to) {
  alignas(64) static constexpr uint16_t kOrder[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), rows));
}

inline NATIVE_INLINE void interleave(const BFloat16* even, const BFloat16* odd, BFloat16* to) {
  const __m512i rows = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)even));
  interleave(_mm512_inserti64x4(rows, _mm256_loadu_si256((const __m256i*)odd), 1), to);
}

// Columns of a panel, from a chunk on.
struct PanelColumns {
  const BFloat16* from;
  int64_t left;  // in the matrix; columns past the last are zeros

  PanelColumns next_chunk() const { return {from + kTileColumns * kPanelRows, left - kTileColumns}; }

  // Write a row of the chunk's tile [16, 16, 2], i.e. two columns.
  inline NATIVE_INLINE void write(int row, uint16_t* tile) const {
    const BFloat16* pair = from + row * kTileColumns;
    __builtin_prefetch(reinterpret_cast<const char*>(pair) + kFarBytes, 0, 2);
    __builtin_prefetch(reinterpret_cast<const char*>(pair) + kNearBytes);
    const __mmask32 mask = left >= 2 * row + 2 ? ~0u : left > 2 * row ? 0xffff : 0;
    interleave(_mm512_maskz_loadu_epi16(mask, pair), tile + row * kTileColumns);
  }
};

template <typename Use, int... I>
inline NATIVE_INLINE void each_constant(std::integer_sequence<int, I...>, const Use& use) {
  (use(std::integral_constant<int, I>{}), ...);
}

// Call use(i) for i in [0, N) as constants, of which numbers of tiles are made.
template <int N, typename Use>
inline NATIVE_INLINE void each_constant(const Use& use) {
  each_constant(std::make_integer_sequence<int, N>{}, use);
}

// Return the rows of the tiles for `multiply_chunk`: sums, inputs and weights.
template <int Terms>
inline TileShapes::Rows tile_rows(const TermTile<Terms> (&x)[1]) {
  const int64_t rows = x[0].num_rows;
  return {rows, rows, rows, rows, rows, kTileRows, kTileRows, kTileRows};
}
template <int Terms>
inline TileShapes::Rows tile_rows(const TermTile<Terms> (&x)[2]) {
  const int64_t first = x[0].num_rows, second = x[1].num_rows;
  return {first, first, second, second, first, second, kTileRows, kTileRows};
}

// The steps of `multiply_chunk`: of a lone tile of tokens, the terms for each panel, else the terms.
template <int Terms, int Tiles, int Panels>
constexpr int kChunkSteps = Terms * (Tiles == 1 ? Panels : 1);

// Add the products of a chunk of one or two tiles of tokens with some panels to tiles of sums, the smallest terms first,
// and call meanwhile(step) after each step.
template <int Panels, int Terms, int Tiles, typename Meanwhile>
inline NATIVE_INLINE void multiply_chunk(const TermTile<Terms> (&x)[Tiles], int64_t chunk, const uint16_t* weights,
                                         const Meanwhile& meanwhile) {
  if constexpr (Tiles == 1) {
    each_constant<Terms>([&](auto term) NATIVE_INLINE { load_tile<2 + term>(x[0].at(chunk, term), kRowBytes); });
    each_constant<Panels>([&](auto i) NATIVE_INLINE {
      load_tile<6 + i>(weights + i * kTileNumbers, kRowBytes);
      each_constant<Terms>([&](auto step) NATIVE_INLINE {
        multiply_tiles<i, 2 + Terms - 1 - step, 6 + i>();
        meanwhile(std::integral_constant<int, i * Terms + step>{});
      });
    });
  } else {
    each_constant<Panels>([&](auto i) NATIVE_INLINE { load_tile<6 + i>(weights + i * kTileNumbers, kRowBytes); });
    each_constant<Terms>([&](auto step) NATIVE_INLINE {
      each_constant<Tiles>([&](auto t) NATIVE_INLINE {
        load_tile<4 + t>(x[t].at(chunk, Terms - 1 - step), kRowBytes);
        each_constant<Panels>([&](auto i) NATIVE_INLINE { multiply_tiles<2 * t + i, 4 + t, 6 + i>(); });
      });
      meanwhile(step);
    });
  }
}

// Call use(index, t, i) for the tiles of sums of some tiles of tokens with some panels.
template <int Tiles, int Panels, typename Use>
inline NATIVE_INLINE void each_sums(const Use& use) {
  each_constant<Tiles>([&](auto t) NATIVE_INLINE {
    each_constant<Panels>([&](auto i) NATIVE_INLINE { use(std::integral_constant<int, 2 * t + i>{}, t, i); });
  });
}

// Write y of a tile of tokens from its finished sums for some panels.
inline void finish_tile(const LinearProblem& p, int64_t first_token, int64_t num_tokens, int64_t panel, int64_t num_panels,
                        float* sums) {
  if (p.gated && num_panels == kTilePanels && !p.task_terms) {
    for (int64_t t = 0; t < num_tokens; ++t, sums += kPanelRows) {
      write_gated_pair(p, first_token + t, panel, load<16>(sums), load<16>(sums + kTileSums));
    }
    return;
  }
  for (int64_t i = 0; i < num_panels; ++i, sums += kTileSums) {
    if (p.task_terms) add_terms(p, first_token, num_tokens, panel + i, sums, kPanelRows);
    for (int64_t t = 0; t < num_tokens; ++t) {
      const F<16> finished[1][1] = {load<16>(sums + t * kPanelRows)};
      finish<1, 1>(p, first_token + t, panel + i, finished);
    }
  }
}

// Chunks of a part of the columns.
struct ChunkRange {
  int64_t first, end;
  bool is_last;  // of the parts
};

// Multiply tiles of tokens, `Tiles` at a time, with panels, `Panels` at a time. Each chunk of weights is written as tiles
// while the chunk before it is multiplied with the first tokens, unless it `is_written`; if all chunks of two panels
// `are_kept`, other tokens find them in the second-level cache, and meanwhile weights `ahead` are fetched.
template <int Tiles, int Panels, int Terms>
void multiply_stream(const LinearProblem& p, const TermTokens<Terms>& tokens, int64_t first_tile, int64_t end_tile,
                     int64_t panel, int64_t end_panel, const ChunkRange& range, uint16_t* written, bool are_kept, bool is_written,
                     NextBlock& ahead, TileShapes& shapes) {
  if (first_tile == end_tile || panel == end_panel) return;
  constexpr int kNumSteps = kChunkSteps<Terms, Tiles, Panels>;
  constexpr int64_t kChunk = Panels * kTileNumbers;
  const int64_t K = p.num_inputs, num_chunks = range.end - range.first, stride = K * kPanelRows;
  const int64_t num_kept = are_kept ? num_chunks : 2;
  alignas(kLineBytes) float finished[Tiles * kTilePanels * kTileSums];
  const auto columns_of = [&](int64_t panel) {
    const int64_t column = range.first * kTileColumns;
    return PanelColumns{static_cast<const BFloat16*>(p.weight) + panel * stride + column * kPanelRows, K - column};
  };
  PanelColumns next = columns_of(panel);
  const auto write = [&](int row, int64_t left, uint16_t* to) NATIVE_INLINE {
    unrolled<Panels>([&](int i) NATIVE_INLINE {
      PanelColumns{next.from + i * stride, left}.write(row, to + i * kTileNumbers);
    });
  };
  for (int row = 0; !is_written && row < kTileRows; ++row) write(row, next.left, written);
  for (int64_t here = 0; panel < end_panel; panel += Panels) {
    for (int64_t tile = first_tile; tile < end_tile; tile += Tiles) {
      const bool is_last_tile = tile + Tiles == end_tile;
      TermTile<Terms> x[Tiles];
      for (int t = 0; t < Tiles; ++t) x[t] = tokens.tile(tile + t);
      shapes.set(tile_rows(x));
      const auto each_sum = [&](const auto& use) NATIVE_INLINE {
        each_sums<Tiles, Panels>([&](auto index, int t, int i) NATIVE_INLINE { use(index, tokens.sums(tile + t, panel + i)); });
      };
      if (range.first == 0) {
        each_sum([](auto i, float*) NATIVE_INLINE { zero_tile<i>(); });
      } else {
        each_sum([](auto i, float* from) NATIVE_INLINE { load_tile<i>(from, kRowBytes); });
      }
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const int64_t there = here + 1 == num_kept ? 0 : here + 1;
        const uint16_t* weights = written + here * kChunk;
        uint16_t* to = written + there * kChunk;
        bool is_missing = !are_kept || tile == first_tile;
        if (chunk + 1 < num_chunks) {
          next = next.next_chunk();
        } else {
          is_missing = is_last_tile ? panel + Panels < end_panel : !are_kept;
          next = columns_of(is_last_tile ? panel + Panels : panel);
        }
        is_missing &= !is_written;
        if (is_missing && next.left >= kTileColumns) {
          multiply_chunk<Panels>(x, range.first + chunk, weights, [&](auto step) NATIVE_INLINE {
            constexpr int kFirst = step * kTileRows / kNumSteps, kEnd = (step + 1) * kTileRows / kNumSteps;
            unrolled<kEnd - kFirst>([&](int row) NATIVE_INLINE { write(kFirst + row, kTileColumns, to); });
          });
        } else {
          for (int row = 0; is_missing && row < kTileRows; ++row) write(row, next.left, to);
          multiply_chunk<Panels>(x, range.first + chunk, weights, [](auto) NATIVE_INLINE {});
          ahead.fetch();
        }
        here = there;
      }
      if (!range.is_last) {
        each_sum([](auto i, float* to) NATIVE_INLINE { store_tile<i>(to, kRowBytes); });
        continue;
      }
      each_sums<Tiles, Panels>([&](auto index, int t, int i) NATIVE_INLINE {
        store_tile<index>(finished + (t * kTilePanels + i) * kTileSums, kRowBytes);
      });
      for (int t = 0; t < Tiles; ++t) {
        finish_tile(p, (tile + t) * kTileRows, x[t].num_rows, panel, Panels, finished + t * kTilePanels * kTileSums);
      }
    }
  }
}

// Return the columns of panels that a thread multiplies some time later, to be fetched in `num_calls` calls.
inline NextBlock weights_ahead(const LinearProblem& p, int64_t panel, int64_t num_panels, int64_t first_column,
                               int64_t end_column, int64_t num_calls) {
  constexpr int64_t kColumnBytes = kPanelRows * sizeof(BFloat16);
  const int64_t panel_bytes = p.num_inputs * kColumnBytes;
  const char* from = static_cast<const char*>(p.weight) + panel * panel_bytes + first_column * kColumnBytes;
  return {from, {panel, num_panels, first_column, end_column - first_column, 0}, kColumnBytes, panel_bytes, num_calls};
}

template <int Terms>
inline Passes passes_of(const TermTokens<Terms>& tokens) {
  return {tokens.num_parts(), tokens.num_tiles() > 2};
}

// Multiply some tiles of tokens with a part of the columns of a range of panels, and fetch the weights of `ahead`
// meanwhile. Two panels stay in the second-level cache while all tokens pass.
template <int Terms>
void multiply_part(const LinearProblem& p, const TermTokens<Terms>& tokens, int64_t tile, int64_t end_tile,
                   const PanelPart& here, const PanelPart& ahead) {
  TileShapes shapes;
  const ChunkRange range{tokens.start(here.part), tokens.start(here.part + 1), here.part + 1 == tokens.num_parts()};
  const int64_t num_chunks = range.end - range.first;
  struct Written;
  const int64_t num_kept = std::max<int64_t>(2, num_chunks);
  auto* const written = aligned<uint16_t>(scratch<Written>((num_kept * kTilePanels * kTileNumbers + kTileColumns) / 2));
  const int64_t end_pairs = end_tile - (end_tile - tile) % 2, num_passes = (end_tile - tile + 1) / 2;
  // The first pass reads the weights of this part; a single one leaves no time to fetch others.
  const int64_t num_ahead = num_passes > 1 ? ahead.end_panel - ahead.panel : 0;
  NextBlock next = weights_ahead(p, ahead.panel, num_ahead, tokens.start(ahead.part) * kTileColumns,
                                 std::min(tokens.start(ahead.part + 1) * kTileColumns, p.num_inputs), num_chunks * (num_passes - 1));
  const bool is_mixed = tile < end_pairs && end_pairs < end_tile, are_kept = end_tile - tile > 2 && num_chunks > 1;
  const bool is_written = is_mixed && are_kept;
  const int64_t step = is_mixed ? kTilePanels : here.end_panel;
  for (int64_t first = here.panel; first < here.end_panel; first += step) {
    const int64_t end = std::min(first + step, here.end_panel), end_two = end - (end - first) % kTilePanels;
    multiply_stream<2, kTilePanels>(p, tokens, tile, end_pairs, first, end_two, range, written, are_kept, false, next, shapes);
    multiply_stream<1, kTilePanels>(p, tokens, end_pairs, end_tile, first, end_two, range, written, are_kept, is_written, next,
                                    shapes);
    multiply_stream<2, 1>(p, tokens, tile, end_pairs, end_two, end, range, written, are_kept, false, next, shapes);
    multiply_stream<1, 1>(p, tokens, end_pairs, end_tile, end_two, end, range, written, are_kept, is_written, next, shapes);
  }
}

}  // namespace NATIVE_ISA

#endif
