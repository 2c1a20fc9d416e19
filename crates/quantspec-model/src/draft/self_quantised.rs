//! The model drafts for itself: weights × view of its cache × pages.

use super::{Drafter, Needs, Proposed, Target};
use crate::backend::{DraftPlan, Turn};
use quantspec_core::Result;
use quantspec_core::config::{Pages, Weights};

/// Drafts by the target's own backend, which holds the sequences: this keeps the plan only. On a GPU the turns take the plan
/// along to the verification, and both run as one graph.
#[derive(Clone, Copy, Debug)]
pub struct SelfQuantised(pub DraftPlan);

impl SelfQuantised {
    /// The drafter of a plan.
    pub fn boxed(plan: DraftPlan) -> Box<dyn Drafter> {
        Box::new(SelfQuantised(plan))
    }
}

impl Drafter for SelfQuantised {
    fn needs(&self) -> Needs {
        let draft_weights = self.0.weights == Weights::Draft;
        Needs { view: Some(self.0.view), draft_weights, distributions: true }
    }

    fn margins(&self) -> bool {
        true
    }

    fn prefill(&mut self, _slot: usize, _prompt: &[u32], _first: u32) -> Result<()> {
        Ok(())
    }

    fn propose(&mut self, target: &mut dyn Target, turns: &mut [Turn], pages: Option<Pages>) -> Result<Proposed> {
        let plan = DraftPlan { pages: pages.unwrap_or(self.0.pages), ..self.0 };
        let asked: Vec<usize> = turns.iter().map(|turn| turn.gamma).collect();
        target.draft(&plan, turns)?;
        // A draft that ended at its first token took a step, and none of it stands.
        let in_vain = turns.iter().zip(asked).filter(|(turn, asked)| turn.gamma == 0 && *asked > 0).count();
        let steps = turns.iter().map(|turn| turn.gamma).max().unwrap_or(0).max(1);
        Ok(Proposed { steps, in_vain, pages: Some(plan.pages) })
    }

    fn commit(&mut self, _slot: usize, _tokens: &[u32]) -> Result<()> {
        Ok(())
    }

    fn close(&mut self, _slot: usize) {}
}
