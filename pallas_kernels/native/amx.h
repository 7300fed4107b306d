// Products of bfloat16 weights by matrix tiles (AMX): an instruction adds 16 x 16 sums of 32 products each.
//
// An input of 24 bits is the sum of three bfloat16 terms of 8 bits, so that products are those of floats: each term is
// multiplied with the weights, and all are added to the same sums. A row of a tile, i.e. a token, meets the same
// instructions however many rows there are. An input that is not finite makes its token's outputs NaN.

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
constexpr int kTerms = 3;
constexpr int kTilePanels = 4;        // panels that a tile of tokens passes at once
constexpr int64_t kTileGroup = 32;    // panels that pass the same columns of tokens, which stay in the second-level cache
constexpr int64_t kBlockColumns = 512;  // columns of panels that stay in the second-level cache while tokens pass
constexpr int64_t kLongStream = 1024;   // columns
constexpr int64_t kConvertedAhead = 2;  // chunks of a stream that are converted before they are multiplied

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

// The shapes of a core's tiles: 0 to 3 are sums of a block of tokens with a panel each, 4 to 6 the terms of its inputs,
// 7 is of weights. Released when it goes.
class TileShapes {
 public:
  TileShapes() = default;
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
  ~TileShapes() { asm volatile("tilerelease"); }

  // Set the number of tokens.
  void set(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.row_bytes[i] = kRowBytes;
      shapes.rows[i] = static_cast<uint8_t>(i == 7 ? kTileRows : rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }

 private:
  int64_t rows_ = 0;
};

// Tokens of a product in tiles of 16, the last may have fewer.
class TileTokens {
 public:
  static constexpr int64_t kTaskTokens = 128;  // packed tokens are more bytes than weights: few tokens and many panels

  int64_t num_tiles() const { return (p_.num_tokens + kTileRows - 1) / kTileRows; }
  int64_t panels_at_once() const { return kTilePanels; }
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

// Tokens packed as terms: each tile as [chunks, terms, rows, 32].
class TermTokens : public TileTokens {
 public:
  using Format = Floats<BFloat16>;

  static int64_t num_chunks(const LinearProblem& p) { return (p.num_inputs + kTileColumns - 1) / kTileColumns; }
  static int64_t size(const LinearProblem& p) {  // and a line to align them
    return (p.num_tokens * num_chunks(p) * kTerms * kTileColumns + kTileColumns) / 2;
  }

  TermTokens(Executor& executor, const LinearProblem& p, float* buffer)
      : TileTokens(p), num_chunks_(num_chunks(p)), terms_(aligned<uint16_t>(buffer)) {
    pack_all(executor, [&](int64_t tile) { pack(tile); });
  }

  // Return the terms of a tile from a chunk on.
  const uint16_t* at(int64_t tile, int64_t chunk) const {
    return terms_ + (tile * kTileRows * num_chunks_ + chunk * rows(tile)) * kTerms * kTileColumns;
  }

  template <typename Number>
  static Number* aligned(void* buffer) {
    return reinterpret_cast<Number*>((reinterpret_cast<uintptr_t>(buffer) + kLineBytes - 1) / kLineBytes * kLineBytes);
  }

 private:
  void pack(int64_t tile) const {
    struct Prepared;
    const int64_t num_rows = rows(tile), K = p_.num_inputs;
    float* buffer = scratch<Prepared>(num_rows * K);
    std::array<const float*, kTileRows> from;
    for (int64_t t = 0; t < num_rows; ++t) from[t] = prepare(p_, tile * kTileRows + t, buffer + t * K);
    uint16_t* to = const_cast<uint16_t*>(at(tile, 0));
    for (int64_t k = 0; k < K; k += kTileColumns, to += kTerms * num_rows * kTileColumns) {
      for (int64_t t = 0; t < num_rows; ++t) {
        F<16> low = load_some<16>(from[t] + k, K - k);
        F<16> high = k + 16 < K ? load_some<16>(from[t] + k + 16, K - k - 16) : F<16>{};
        for (int64_t term = 0; term < kTerms; ++term) {
          const I<16> low_bits = bits_of<I<16>>(low) & kTermBits, high_bits = bits_of<I<16>>(high) & kTermBits;
          _mm512_storeu_si512(to + (term * num_rows + t) * kTileColumns, upper_halves(low_bits, high_bits));
          low -= bits_of<F<16>>(low_bits);
          high -= bits_of<F<16>>(high_bits);
        }
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
};

// Write columns of one panel as tiles [chunks, 16, 16, 2], a row of a tile being two columns; those past the last are
// zeros.
inline void write_tiles(const BFloat16* from, int64_t num_columns, uint16_t* to) {
  alignas(64) static constexpr uint16_t kOrder[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kOrder);
  const int64_t end = (num_columns + kTileColumns - 1) / kTileColumns * kTileColumns;
  int64_t k = 0;
  for (; k + 2 <= num_columns; k += 2, from += kTileColumns, to += kTileColumns) {
    prefetch<kVectors>(from, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, _mm512_loadu_si512(from)));
  }
  if (k < num_columns) {
    const __m512i column = _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, column));
    k += 2, to += kTileColumns;
  }
  for (; k < end; k += 2, to += kTileColumns) _mm512_storeu_si512(to, _mm512_setzero_si512());
}

template <typename Use, int... I>
inline NATIVE_INLINE void each_constant(std::integer_sequence<int, I...>, const Use& use) {
  (use(std::integral_constant<int, I>{}), ...);
}

// Call use(i) for i in [0, N) as constants, of which numbers of tiles are made.
template <int N, typename Use>
inline NATIVE_INLINE void each_constant(const Use& use) {
  each_constant(std::make_integer_sequence<int, N>{}, use);
}

// Some chunks of some panels, as tiles.
struct TileBlock {
  const uint16_t* weights;  // [panels][chunks, 16, 16, 2]
  int64_t stride;           // numbers from panel to panel
  int64_t first_chunk, num_chunks;
  NextBlock next;
};

// Add the products of one chunk of a tile of tokens with some panels.
template <int Panels>
inline NATIVE_INLINE void multiply_chunk(const uint16_t* x, int64_t term_numbers, const uint16_t* weights, int64_t stride) {
  each_constant<kTerms>([&](auto term) NATIVE_INLINE { load_tile<4 + term>(x + term * term_numbers, kRowBytes); });
  each_constant<Panels>([&](auto panel) NATIVE_INLINE {
    load_tile<7>(weights + panel * stride, kRowBytes);
    each_constant<kTerms>([&](auto term) NATIVE_INLINE { multiply_tiles<panel, 4 + term, 7>(); });
  });
}

template <int Panels>
inline NATIVE_INLINE void store_sums(float* to) {
  each_constant<Panels>([&](auto i) NATIVE_INLINE { store_tile<i>(to + i * kTileSums, kRowBytes); });
}

// Write y of a tile of tokens from its finished sums for some panels.
inline void finish_tile(const LinearProblem& p, int64_t first_token, int64_t num_tokens, int64_t panel, int64_t num_panels,
                        const float* sums) {
  for (int64_t i = 0; i < num_panels; ++i, sums += kTileSums) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      const F<16> finished[1][1] = {load<16>(sums + t * kPanelRows)};
      finish<1, 1>(p, first_token + t, panel + i, finished);
    }
  }
}

// Add the products of a tile of tokens with a block of panels to sums [Panels, rows, 16].
template <int Panels>
void multiply_tile(const TermTokens& tokens, int64_t tile, TileBlock& block, float* kept) {
  const int64_t term_numbers = tokens.rows(tile) * kTileColumns;
  const uint16_t* x = tokens.at(tile, block.first_chunk);
  each_constant<Panels>([&](auto i) NATIVE_INLINE {
    if (block.first_chunk == 0) {
      zero_tile<i>();
    } else {
      load_tile<i>(kept + i * kTileSums, kRowBytes);
    }
  });
  for (int64_t chunk = 0; chunk < block.num_chunks; ++chunk, x += kTerms * term_numbers) {
    block.next.fetch(), block.next.fetch();
    multiply_chunk<Panels>(x, term_numbers, block.weights + chunk * kTileNumbers, block.stride);
  }
  store_sums<Panels>(kept);
}

// Multiply a lone tile of tokens with some panels, which stream from memory.
template <int Panels>
void multiply_stream(const LinearProblem& p, const TermTokens& tokens, int64_t panel) {
  constexpr int64_t kRing = 2 * kConvertedAhead;  // chunks: tiles are loaded a while after they are stored
  alignas(kLineBytes) uint16_t ring[Panels][kRing][kTileNumbers];
  alignas(kLineBytes) float sums[Panels * kTileSums];
  const int64_t K = p.num_inputs, num_chunks = TermTokens::num_chunks(p), term_numbers = tokens.rows(0) * kTileColumns;
  const BFloat16* from = static_cast<const BFloat16*>(p.weight) + panel * K * kPanelRows;
  const auto convert = [&](int64_t chunk) NATIVE_INLINE {
    const int64_t column = chunk * kTileColumns, num_columns = std::min(kTileColumns, K - column);
    for (int i = 0; i < Panels; ++i) {
      write_tiles(from + (i * K + column) * kPanelRows, num_columns, ring[i][chunk % kRing]);
    }
  };
  each_constant<Panels>([&](auto i) NATIVE_INLINE { zero_tile<i>(); });
  for (int64_t chunk = -kConvertedAhead; chunk < num_chunks; ++chunk) {
    if (chunk + kConvertedAhead < num_chunks) convert(chunk + kConvertedAhead);
    if (chunk < 0) continue;
    const uint16_t* x = tokens.at(0, chunk);
    multiply_chunk<Panels>(x, term_numbers, ring[0][chunk % kRing], kRing * kTileNumbers);
  }
  store_sums<Panels>(sums);
  finish_tile(p, 0, tokens.rows(0), panel, Panels, sums);
}

// Multiply a lone tile of tokens with a range of panels, two streams at a time unless they are short.
inline void multiply_panels(const LinearProblem& p, const TermTokens& tokens, int64_t panel, int64_t end_panel) {
  TileShapes shapes;
  shapes.set(tokens.rows(0));
  for (; p.num_inputs >= kLongStream && panel + 2 <= end_panel; panel += 2) multiply_stream<2>(p, tokens, panel);
  for (; panel < end_panel; ++panel) multiply_stream<1>(p, tokens, panel);
}

// Multiply some tiles of tokens with a range of panels. A block of some panels and the sums stay in the
// second-level cache while all tokens pass.
inline void multiply_blocks(const LinearProblem& p, const TermTokens& tokens, int64_t first_tile, int64_t end_tile,
                            int64_t first_panel, int64_t end_panel) {
  constexpr int64_t kSums = kTilePanels * kTileSums;
  const int64_t K = p.num_inputs, num_tiles = end_tile - first_tile;
  const int64_t columns = std::min((K + kTileColumns - 1) / kTileColumns * kTileColumns, kBlockColumns);
  struct Sums;
  float* sums = TermTokens::aligned<float>(scratch<Sums>((kTileGroup / kTilePanels + kTilePanels) * num_tiles * kSums + kLineBytes));
  struct Converted;
  auto* converted = TermTokens::aligned<uint16_t>(scratch<Converted>((kTilePanels * columns * kPanelRows + kLineBytes) / 2));
  const auto* weights = static_cast<const BFloat16*>(p.weight);
  const int64_t column_bytes = kPanelRows * sizeof(*weights);
  TileShapes shapes;
  each_block(first_panel, end_panel, kTileGroup, kTilePanels, K, columns, [&](const PanelBlock& here, const PanelBlock& next) {
    TileBlock block{converted, columns * kPanelRows, here.column / kTileColumns,
                    (here.num_columns + kTileColumns - 1) / kTileColumns, {}};
    for (int64_t i = 0; i < here.num_panels; ++i) {
      const BFloat16* from = weights + ((here.panel + i) * K + here.column) * kPanelRows;
      write_tiles(from, here.num_columns, converted + i * block.stride);
    }
    const BFloat16* from = weights + (next.panel * K + next.column) * kPanelRows;
    block.next = NextBlock(from, next, column_bytes, K * column_bytes, here, num_tiles);
    float* kept = sums + here.index * num_tiles * kSums;
    for (int64_t tile = first_tile; tile < end_tile; ++tile, kept += kSums) {
      shapes.set(tokens.rows(tile));
      (here.num_panels == kTilePanels ? multiply_tile<kTilePanels> : multiply_tile<1>)(tokens, tile, block, kept);
      if (here.column + here.num_columns == K) {
        finish_tile(p, tile * kTileRows, tokens.rows(tile), here.panel, here.num_panels, kept);
      }
    }
  });
}

}  // namespace NATIVE_ISA

#endif
