//! Rounds: launched kernel by kernel, recorded as graphs, and found again.

use super::CudaBackend;
use super::describe::Plan;
use crate::device::Mark;
use crate::recorded::Kind;
use crate::sample::Manner;
use quantspec_core::{ErrorKind, Result};
use quantspec_model::backend::{DraftPlan, Network, Pass, Row, Step, Turn};

/// Points of a round in the device's time.
pub(super) struct Clock {
    pub(super) start: Mark,
    pub(super) drafted: Mark,
    /// The last verification drafted.
    pub(super) ran: bool,
}

impl CudaBackend {
    /// Queues a whole step that was described, up to its logits.
    pub(super) fn queue(&mut self, step: &Step, plan: &Plan) -> Result<()> {
        self.plan = plan.clone();
        let pass = Pass::Step(step);
        self.step_embed(step)?;
        for layer in 0..self.config.layers {
            self.qkv(layer, &pass)?;
            self.attend(layer, &pass)?;
            self.output(layer, &pass)?;
            self.gate_up(layer, &pass)?;
            self.down(layer, &pass)?;
        }
        self.head(&pass)
    }

    /// Queues a round: draft steps with their choices, the verification and its judgement of `turns`; without turns draft steps alone. `recording`: into
    /// a graph.
    fn queue_round(
        &mut self,
        round: &[(Step, Plan)],
        turns: Option<(u64, usize)>,
        manner: Manner,
        recording: bool,
    ) -> Result<()> {
        let logits = self.step.logits.at(0);
        let (drafts, verify) = round.split_at(round.len() - usize::from(turns.is_some()));
        // What is drafted by itself the host times.
        let timed = !drafts.is_empty() && turns.is_some();
        if timed {
            self.clock.start.set(recording)?;
        }
        for (step, plan) in drafts {
            self.queue(step, plan)?;
            self.sampling.propose(step.rows.len(), plan.rows, logits, manner)?;
        }
        if timed {
            self.clock.drafted.set(recording)?;
        }
        for ((step, plan), turns) in verify.iter().zip(turns) {
            self.queue(step, plan)?;
            self.sampling.judge(turns.0, turns.1, step.rows.len(), plan.rows, logits, manner)?;
        }
        Ok(())
    }

    /// Runs what [`CudaBackend::queue_round`] queues, as a graph where two like it ran before: some hundred launches per step become one.
    pub(super) fn run(&mut self, round: &[(Step, Plan)], turns: Option<(u64, usize)>, manner: Manner) -> Result<()> {
        let (turns_at, count) = turns.unwrap_or_default();
        let how = u64::from(manner.warm) | u64::from(manner.rejects) << 1;
        let mut key = vec![turns_at, count as u64, how, self.sampling.draft_address()];
        for (step, plan) in round {
            self.key(step, plan, &mut key);
        }
        match self.recorded.find(&key) {
            // SAFETY: everything recorded belongs to this backend; buffers that may be replaced are part of the key.
            Some(Kind::Graph(graph)) => unsafe { graph.launch() },
            Some(Kind::Refused) => self.queue_round(round, turns, manner, false),
            None if self.device.one_by_one => self.queue_round(round, turns, manner, false),
            None => {
                self.recorded.note(key, Kind::Seen, round.len());
                self.queue_round(round, turns, manner, false)
            }
            Some(Kind::Seen) => {
                // Launched one by one once more, and recorded while the GPU works on it: building a graph of thousands of launches
                // takes milliseconds.
                self.queue_round(round, turns, manner, false)?;
                let device = self.device.clone();
                // The plan counts no graphs. Where memory for one is lacking, or the driver refuses, the round is slower and nothing else.
                let kind = match device.record(|| self.queue_round(round, turns, manner, true)) {
                    Ok(graph) => Kind::Graph(graph),
                    Err(error) if matches!(error.kind, ErrorKind::DoesNotFit | ErrorKind::Device) => Kind::Refused,
                    Err(error) => return Err(error),
                };
                self.recorded.note(key, kind, round.len());
                Ok(())
            }
        }
    }

    /// Drafts one sequence's tokens where the host looks at each: a step begins when it has seen the lead of the one before. The GPU waits for that a
    /// hundredth of a millisecond, and what is not drafted in vain is worth more.
    pub(super) fn draft_watched(&mut self, plan: &DraftPlan, turn: &mut Turn) -> Result<()> {
        (self.hooks.poll)()?;
        let DraftPlan { weights, view, pages } = *plan;
        let manner = self.sampling.learn(std::slice::from_ref(turn))?;
        while turn.leads.len() < turn.gamma {
            let offset = turn.leads.len();
            let rows = [Row { slot: turn.slot, offset, position: turn.committed + offset }];
            let step = Step { weights, view, pages, choose_pages: offset == 0, rows: &rows };
            // Every step is described at the same place, so that all of them are one graph.
            self.stage()?;
            let mut at = 0;
            let mut plan = self.describe(&step, &mut at)?;
            plan.drafts = true;
            self.sampling.drafts(turn.slot, offset);
            self.send(at)?;
            self.run(&[(step, plan)], None, manner)?;
            turn.drafted(self.sampling.lead()?);
            // The host has waited for everything it sent.
            self.staged = 0;
        }
        Ok(())
    }
}
