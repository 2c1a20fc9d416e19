//! Conversion to BF16 with AVX-512.
use std::arch::x86_64::*;

/// Converts sixteen f16 to BF16, or with REST their rests ([`crate::lanes::bf16_rest`]).
///
/// # Safety
/// Sixteen f16 are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn halves<const REST: bool>(from: *const u16) -> __m256i {
    // SAFETY: the caller's promise; both vectors have 32 bytes.
    unsafe {
        let round = |x| std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x));
        let x = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
        let nearest = round(x);
        if REST { round(_mm512_sub_ps(x, low_values(_mm512_cvtepu16_epi32(nearest)))) } else { nearest }
    }
}

/// Sixteen f16 at each address as words of BF16 pairs, converted by [`halves`].
///
/// # Safety
/// Sixteen f16 are readable at both addresses.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn pair_of_halves<const REST: bool>(first: *const u16, second: *const u16) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = (_mm512_cvtepu16_epi32(halves::<REST>(first)), _mm512_cvtepu16_epi32(halves::<REST>(second)));
        _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
    }
}

/// The first BF16 number of each word.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn low_values(words: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
}

/// The second BF16 number of each word.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn high_values(words: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(!0xffff)))
}

/// Words of BF16 pairs, rounded with one addition: ties away from zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn rounded_pair(low: __m512, high: __m512) -> __m512i {
    let half = _mm512_set1_epi32(0x8000);
    let low = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(low), half));
    let high = _mm512_add_epi32(_mm512_castps_si512(high), half);
    _mm512_mask_blend_epi16(0xaaaa_aaaa, low, high)
}
