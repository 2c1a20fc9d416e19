//! Logits of a whole model on the GPU compared with the CPU backend, which is tested against the reference.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "errors are worth seeing")]

mod gpu;
#[path = "gpu/model.rs"]
mod small;

use gpu::device;
use quantspec_core::config::{Pages, View, Weights};
use quantspec_cpu::CpuBackend;
use quantspec_cuda::CudaBackend;
use quantspec_cuda::device::Device;
use quantspec_model::backend::{Backend, Hooks, Row, Step, TokenSampler};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::forward;
use small::{checkpoints, options, prompt};
use std::sync::Arc;

/// Root mean square of the difference of two rows of logits, relative to the spread of the second.
fn apart(a: &[f32], b: &[f32]) -> f64 {
    let n = b.len() as f64;
    let mean = b.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let spread = b.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
    (a.iter().zip(b).map(|(&x, &y)| (f64::from(x) - f64::from(y)).powi(2)).sum::<f64>() / spread).sqrt()
}

#[test]
fn logits_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    for checkpoint in checkpoints(&device, 700) {
        compare(&device, &checkpoint);
    }
}

fn compare(device: &Arc<Device>, checkpoint: &Checkpoint) {
    let options = options(700, 1);
    let vocab = checkpoint.config().vocab;
    let tokens = prompt(vocab, 640, 1);
    let mut gpu = CudaBackend::load_on(device, checkpoint, &options, Hooks::default()).unwrap();
    let mut reference = CpuBackend::load(checkpoint, &options, Hooks::default()).unwrap();
    let window = [tokens[7], tokens[90], tokens[3], tokens[4], tokens[5]];
    let rows: Vec<Row> = (0..window.len()).map(|i| Row { slot: 0, offset: i, position: tokens.len() + i }).collect();
    fn prepare<B: Backend>(backend: &mut B, tokens: &[u32], window: &[u32]) -> Vec<f32> {
        backend.open(0, 700).unwrap();
        forward::prefill(backend, 0, tokens, 256, &mut |_, _| {}).unwrap();
        let logits = backend.logits(0).unwrap();
        backend.set_window(0, window).unwrap();
        logits
    }
    let first = (prepare(&mut gpu, &tokens, &window), prepare(&mut reference, &tokens, &window));
    let error = apart(&first.0, &first.1);
    eprintln!("prefill: {error:.4} of the logits' spread");
    // Both round GEMM inputs to bfloat16, at different points.
    assert!(error < 0.03, "prefill {error}");
    for (weights, view, count, bound) in [
        (Weights::Full, View::Both, 5, 0.03),
        (Weights::Full, View::Full, 5, 0.03),
        (Weights::Full, View::Upper, 5, 0.06),
        // A difference in the last bit of an activation can change its int8 code by one. Drafts of one and two rows use
        // separate kernels.
        (Weights::Draft, View::Upper, 1, 0.25),
        (Weights::Draft, View::Upper, 2, 0.25),
        (Weights::Draft, View::Upper, 5, 0.25),
    ] {
        let rows = &rows[..count];
        let step = Step { weights, view, pages: Pages::All, choose_pages: false, rows };
        forward::step(&mut gpu, &step).unwrap();
        forward::step(&mut reference, &step).unwrap();
        for row in 0..rows.len() {
            let error = apart(&gpu.logits(row).unwrap(), &reference.logits(row).unwrap());
            eprintln!("{weights:?} {view:?} row {row} of {count}: {error:.4}");
            assert!(error < bound, "{weights:?} {view:?} row {row} of {count}: {error}");
        }
    }
}
