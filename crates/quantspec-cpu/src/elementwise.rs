//! Elementwise operations: norms, rotary embeddings, SiLU and GELU. Rows of a step are `[row][feature]`. Prompt rows are panels
//! `[feature][64 tokens]`, on which all operations work lane by lane.

use crate::dispatch::{Simd, portable};
use crate::lanes::{gelu, madd, silu, sum16};
use quantspec_core::config::Activation;

/// Tokens of a prefill panel.
pub(crate) const PANEL_TOKENS: usize = 64;

/// Lanes processed at once inside a panel: a quarter of it, one AVX-512 vector.
pub(crate) const LANES: usize = 16;

/// RMSNorm of one row: `y = x / √(mean(x²) + eps) · weight`. Sixteen partial sums in feature order, joined in one tree.
pub(crate) fn rms_norm(simd: Simd, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    #[inline(always)]
    fn body<const FMA: bool>(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let mut squares = [0f32; 16];
        let (whole, rest) = x.split_at(x.len() / 16 * 16);
        for v in whole.chunks_exact(16) {
            for l in 0..16 {
                squares[l] = madd::<FMA>(v[l], v[l], squares[l]);
            }
        }
        for (l, v) in rest.iter().enumerate() {
            squares[l] = madd::<FMA>(*v, *v, squares[l]);
        }
        let scale = 1.0 / (sum16(squares) / x.len() as f32 + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = x * scale * w;
        }
    }
    portable!(simd, body(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]));
}

/// Rotates the pairs (i, i + D/2) of one head by its position's cosines and sines, [D/2] each.
pub(crate) fn rope(simd: Simd, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    #[inline(always)]
    fn body<const FMA: bool>(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        let (a, b) = x.split_at_mut(cos.len());
        for (((a, b), c), s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
    portable!(simd, body(x: &mut [f32], cos: &[f32], sin: &[f32]));
}

/// `gate := activation(gate) · up`.
pub(crate) fn activate_mul(simd: Simd, activation: Activation, gate: &mut [f32], up: &[f32]) {
    #[inline(always)]
    fn with_silu<const FMA: bool>(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = silu::<FMA>(*g) * u;
        }
    }
    #[inline(always)]
    fn with_gelu<const FMA: bool>(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = gelu::<FMA>(*g) * u;
        }
    }
    match activation {
        Activation::Silu => portable!(simd, with_silu(gate: &mut [f32], up: &[f32])),
        Activation::Gelu => portable!(simd, with_gelu(gate: &mut [f32], up: &[f32])),
    }
}

/// RMSNorm of sixteen tokens of a panel: `x[feature][64]` from lane `lane` on, each token summed over features upwards.
/// Writes the sixteen normalised values of each feature to `y`.
pub(crate) fn rms_norm_panel(simd: Simd, x: &[f32], lane: usize, weight: &[f32], eps: f32, y: &mut [[f32; LANES]]) {
    #[inline(always)]
    fn body<const FMA: bool>(x: &[f32], lane: usize, weight: &[f32], eps: f32, y: &mut [[f32; LANES]]) {
        let mut squares = [0f32; LANES];
        for x in x.chunks_exact(PANEL_TOKENS) {
            let x = &x[lane..lane + LANES];
            for l in 0..LANES {
                squares[l] = madd::<FMA>(x[l], x[l], squares[l]);
            }
        }
        let mut scale = [0f32; LANES];
        for l in 0..LANES {
            scale[l] = 1.0 / (squares[l] / weight.len() as f32 + eps).sqrt();
        }
        for ((y, x), w) in y.iter_mut().zip(x.chunks_exact(PANEL_TOKENS)).zip(weight) {
            let x = &x[lane..lane + LANES];
            for l in 0..LANES {
                y[l] = x[l] * scale[l] * w;
            }
        }
    }
    portable!(simd, body(x: &[f32], lane: usize, weight: &[f32], eps: f32, y: &mut [[f32; LANES]]));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Noise, paths};

    #[test]
    fn norm_of_a_row_and_of_a_panel_match_f64() {
        let mut noise = Noise::new(1);
        for simd in paths() {
            for n in [8, 64, 172, 1000] {
                let (x, w) = (noise.normals(n * PANEL_TOKENS), noise.normals(n));
                let token = |t: usize| -> Vec<f32> { (0..n).map(|c| x[c * PANEL_TOKENS + t]).collect() };
                for t in [0, 17, 63] {
                    let row = token(t);
                    let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64 + 1e-5;
                    let exact: Vec<f64> =
                        row.iter().zip(&w).map(|(v, w)| f64::from(*v) / mean.sqrt() * f64::from(*w)).collect();
                    let mut y = vec![0.0; n];
                    rms_norm(simd, &row, &w, 1e-5, &mut y);
                    let mut z = vec![[0.0; LANES]; n];
                    rms_norm_panel(simd, &x, t / LANES * LANES, &w, 1e-5, &mut z);
                    for c in 0..n {
                        assert!((f64::from(y[c]) - exact[c]).abs() < 1e-6 * exact[c].abs() + 1e-9);
                        assert!((f64::from(z[c][t % LANES]) - exact[c]).abs() < 2e-6 * exact[c].abs() + 1e-9);
                    }
                }
            }
        }
    }

    #[test]
    fn activations_match_f64() {
        let mut noise = Noise::new(2);
        let mut x: Vec<f32> = noise.normals(500).iter().map(|x| 4.0 * x).collect();
        x.extend([0.0, -0.0, 30.0, -30.0, 1e30, -1e30]);
        for simd in paths() {
            for activation in [Activation::Silu, Activation::Gelu] {
                let mut gate = x.clone();
                activate_mul(simd, activation, &mut gate, &vec![0.5; x.len()]);
                for (&x, y) in x.iter().zip(gate) {
                    let v = f64::from(x);
                    let exact = match activation {
                        Activation::Silu => v / (1.0 + (-v).exp()),
                        Activation::Gelu => {
                            0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3))).tanh())
                        }
                    };
                    assert!((2.0 * f64::from(y) - exact).abs() <= 4e-6 * v.abs().min(1.0).max(exact.abs()), "{x} {y}");
                }
            }
        }
    }

    #[test]
    fn rope_turns_pairs() {
        for simd in paths() {
            let mut x = [1.0, 0.0, 0.0, 2.0];
            rope(simd, &mut x, &[0.0, 1.0], &[1.0, 0.0]);
            assert_eq!(x, [0.0, 0.0, 1.0, 2.0]);
        }
    }
}
