//! Progress calls and errors of the evaluation. Its numbers are tested by the goldens of the command line
//! (tests/test_eval.py).
#![cfg(feature = "reference")]

#[path = "support/tiny.rs"]
mod tiny;

use quantspec_core::ablation::{Ablation, Axis};
use quantspec_core::config::Rounding;
use quantspec_model::backend::{Hooks, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::evaluate::{Text, evaluate, options};
use quantspec_model::reference::ReferenceBackend;

#[test]
fn progress_goes_on_from_the_context_to_the_last_position() {
    let folder = tiny::Folder::valid();
    let checkpoint = Checkpoint::open(folder.path()).expect("checkpoint");
    let tokens: Vec<u32> = (0..120).map(|i| i * i % 16).collect();
    let options = options(tokens.len(), Rounding::Balanced, 1);
    for (context, block_rows) in [(0, 16), (50, 16), (50, 256), (118, 16)] {
        let mut backend = ReferenceBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
        let mut seen = Vec::new();
        let text = Text { tokens: &tokens, context, block_rows };
        let scored = evaluate(&mut backend, None, text, &[2], &mut |done, total| seen.push((done, total)));
        let scored = scored.expect("scores");
        // Each of three targets prefills the context; the first token after it is only fed.
        let total = 3 * context + scored.positions;
        assert_eq!(scored.positions, 119 - context);
        assert!(seen.iter().all(|(done, all)| *all == total && (1..=total).contains(done)), "{seen:?}");
        assert!(seen.is_sorted(), "context {context}: {seen:?}");
        assert_eq!(seen.last(), Some(&(total, total)));
        // Progress through the context advances by blocks.
        let reading = seen.iter().filter(|(done, _)| *done <= 3 * context).count();
        assert!(reading >= 3 * context.div_ceil(block_rows), "{reading} calls for a context of {context}");
    }
}

#[test]
fn an_ablation_with_the_engines_groups_changes_rounding_only() {
    let folder = tiny::Folder::valid();
    let checkpoint = Checkpoint::open(folder.path()).expect("checkpoint");
    let tokens: Vec<u32> = (0..420).map(|i| i * i % 16).collect();
    let score = |ablation| {
        let options = Options { ablation, ..options(tokens.len(), Rounding::Balanced, 1) };
        let mut backend = ReferenceBackend::load(&checkpoint, &options, Hooks::default()).expect("load");
        let text = Text { tokens: &tokens, context: 0, block_rows: options.block_rows };
        evaluate(&mut backend, None, text, &[], &mut |_, _| ()).expect("scores")
    };
    let (engine, own) = (score(None), score(Some(Ablation::OWN)));
    let other = score(Some(Ablation { key_axis: Axis::Token, group: 4, ..Ablation::OWN }));
    let truncated = score(Some(Ablation { truncated: true, ..Ablation::OWN }));
    // Views fp16, int8 and int4; the first has no groups.
    let distance = |at: usize, scored: &quantspec_model::evaluate::Evaluation| {
        let (engine, scored) = (engine.targets[at].1.kld, scored.targets[at].1.kld);
        (scored - engine).abs() / engine
    };
    for scored in [&own, &other, &truncated] {
        assert_eq!(scored.targets[0], engine.targets[0]);
    }
    let (near, turned, cut) = (distance(2, &own), distance(2, &other), distance(2, &truncated));
    assert!(near < 0.1 && distance(1, &own) < 0.3, "{near} {}", distance(1, &own));
    // Truncated codes affect view Upper, which drafts read, and not the target of both nibbles.
    assert_eq!(truncated.targets[1], own.targets[1]);
    assert!(turned > 3.0 * near && cut > 3.0 * near, "{near} {turned} {cut}");
}
