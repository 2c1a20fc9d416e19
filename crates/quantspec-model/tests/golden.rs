//! The reference backend against logits of Hugging Face transformers: every family, every kind of RoPE, every option.
#![cfg(feature = "reference")]

#[path = "support/golden.rs"]
mod golden;

use quantspec_core::config::View;
use quantspec_model::backend::{Hooks, KvCache, TokenSampler};
use quantspec_model::reference::ReferenceBackend;

/// Both sides compute in f32; they differ in the order of sums and in angles (f64 here, f32 there). Measured: up to 1.6e-5 of
/// the logits' deviation; a wrong angle, norm or bias changes them by tenths.
const EXACT: f32 = 1e-4;
/// Decode steps read keys and values rounded to f16 (half a unit is 2⁻¹² of the value), which changes the scores of sharp
/// attention by thousandths. Measured: up to 6e-3.
const HALF: f32 = 2e-2;
/// The INT8 view adds half a step of 1/255 of each group's range. Measured: up to 4e-2 over four pages.
const INT8: f32 = 1e-1;

fn load(golden: &golden::Golden) -> ReferenceBackend {
    ReferenceBackend::load(&golden.checkpoint, &golden::options(golden, 1), Hooks::default()).expect("load")
}

#[test]
fn prompts_agree_with_transformers() {
    for golden in golden::all() {
        let mut backend = load(&golden);
        let prompts = if golden.ids.len() > 100 { 4 } else { golden.ids.len() };
        golden::check_prefill(&mut backend, &golden, prompts, EXACT);
    }
}

#[test]
fn steps_agree_with_transformers() {
    for golden in golden::all() {
        for (view, tolerance) in [(View::Full, HALF), (View::Both, INT8)] {
            golden::check_steps(&mut load(&golden), &golden, view, tolerance);
        }
    }
}

#[test]
fn a_wrong_function_is_noticed() {
    // The comparison must be able to fail: logits of one kind of RoPE against the goldens of another.
    let goldens = golden::all();
    let of = |name: &str| goldens.iter().find(|golden| golden.name == name).expect("golden");
    let (plain, linear) = (of("llama-rope/config"), of("llama-rope/linear"));
    let mut backend = load(linear);
    backend.open(0, plain.ids.len()).expect("open");
    quantspec_model::forward::prefill(&mut backend, 0, &plain.ids, 16, &mut |_, _| ()).expect("prefill");
    let logits = backend.logits(0).expect("logits");
    let last = plain.prefill.last().expect("rows");
    let worst = logits.iter().zip(last).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst > INT8, "another RoPE moves the logits by {worst} only");
}
