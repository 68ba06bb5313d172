//! Pipeline schedules, simulated for all stages by the rules of the schedule.

use std::fmt;

/// Pipeline schedule: order of forwards and backwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PipelineScheduleKind {
    /// All forwards, then all backwards (GPipe; Huang et al., 2019; <https://arxiv.org/abs/1811.06965>).
    GPipe,
    /// 1F1B: alternates forwards and backwards; interleaved with several model chunks per stage. (Narayanan et al.,
    /// 2021; <https://arxiv.org/abs/2104.04473>, figures 3 and 4.)
    #[default]
    OneForwardOneBackward,
}

/// A forward or backward pass of a micro-batch through a model chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkPass {
    /// Index of the model chunk on its stage.
    pub chunk: usize,
    /// Index of the micro-batch.
    pub micro: usize,
}

/// One step of a stage's schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageStep {
    /// Forward pass.
    Forward(ChunkPass),
    /// Backward pass.
    Backward(ChunkPass),
}

/// Simulated schedule of all stages, in time units of one chunk's forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineSchedule {
    n_chunks: usize,
    n_micros: usize,
    /// Steps of each stage with their start times.
    stages: Vec<Vec<(usize, StageStep)>>,
}

/// Duration of a chunk's forward.
const FORWARD: usize = 1;
/// Duration of a chunk's backward.
const BACKWARD: usize = 2;

impl PipelineSchedule {
    /// Simulates `schedule` with `n_stages` stages, `n_chunks` model chunks each and `n_micros` micro-batches.
    pub fn new(schedule: PipelineScheduleKind, n_stages: usize, n_chunks: usize, n_micros: usize) -> Self {
        let mut stages: Vec<_> =
            (0..n_stages).map(|stage| Stage::new(schedule, stage, [n_stages, n_chunks, n_micros])).collect();
        let mut done = Done::new([n_stages, n_chunks, n_micros]);
        for time in 0.. {
            if stages.iter().all(Stage::is_through) {
                break;
            }
            let started: Vec<_> = stages.iter_mut().map(|stage| stage.start(time, &done)).collect();
            // All stages are idle and blocked by their in-flight limits.
            if started.iter().all(|step| !step) && stages.iter().all(|stage| stage.is_idle(time)) {
                stages.iter_mut().for_each(|stage| stage.max_in_flight += 1);
            }
            stages.iter().for_each(|stage| done.note(stage));
        }
        Self { n_chunks, n_micros, stages: stages.into_iter().map(|stage| stage.steps).collect() }
    }

    /// Returns the steps of a stage, in order.
    pub fn stage_steps(&self, stage: usize) -> impl Iterator<Item = StageStep> {
        self.stages[stage].iter().map(|(_, step)| *step)
    }

    /// Returns the duration of the slowest stage.
    pub fn duration(&self) -> usize {
        let ends = self.stages.iter().filter_map(|steps| steps.last());
        ends.map(|(begin, step)| begin + step.time()).max().unwrap_or(0)
    }

    /// Returns the pipeline bubble: the idle fraction of all stages' time.
    pub fn bubble(&self) -> f64 {
        let busy = (FORWARD + BACKWARD) * self.n_chunks * self.n_micros;
        match self.duration() {
            0 => 0.0,
            length => 1.0 - busy as f64 / length as f64,
        }
    }

    /// Returns the maximum number of in-flight passes (forward done, backward pending) on a stage.
    pub fn max_in_flight(&self, stage: usize) -> usize {
        let (mut live, mut most) = (0usize, 0);
        for step in self.stage_steps(stage) {
            match step {
                StageStep::Forward(_) => live += 1,
                StageStep::Backward(_) => live -= 1,
            }
            most = most.max(live);
        }
        most
    }
}

impl StageStep {
    fn time(self) -> usize {
        match self {
            Self::Forward(_) => FORWARD,
            Self::Backward(_) => BACKWARD,
        }
    }
}

/// A stage during simulation.
struct Stage {
    stage: usize,
    n_stages: usize,
    n_chunks: usize,
    forwards: Vec<ChunkPass>,
    backwards: Vec<ChunkPass>,
    n_forwards: usize,
    n_backwards: usize,
    /// Limit of in-flight passes.
    max_in_flight: usize,
    free_at: usize,
    steps: Vec<(usize, StageStep)>,
}

/// End time of each pass, by direction, stage, chunk and micro-batch.
struct Done {
    sizes: [usize; 3],
    forward: Vec<Option<usize>>,
    backward: Vec<Option<usize>>,
}

impl Stage {
    fn new(schedule: PipelineScheduleKind, stage: usize, [n_stages, n_chunks, n_micros]: [usize; 3]) -> Self {
        let max_in_flight = match schedule {
            PipelineScheduleKind::GPipe => n_chunks * n_micros,
            PipelineScheduleKind::OneForwardOneBackward if n_chunks == 1 => n_stages - stage,
            PipelineScheduleKind::OneForwardOneBackward => 2 * (n_stages - stage - 1) + (n_chunks - 1) * n_stages + 1,
        };
        let (forwards, backwards) = (
            passes(n_stages, n_chunks, n_micros, |chunk| chunk),
            passes(n_stages, n_chunks, n_micros, |chunk| n_chunks - 1 - chunk),
        );
        Self {
            stage,
            n_stages,
            n_chunks,
            forwards,
            backwards,
            n_forwards: 0,
            n_backwards: 0,
            max_in_flight,
            free_at: 0,
            steps: Vec::new(),
        }
    }

    fn is_through(&self) -> bool {
        self.n_backwards == self.backwards.len()
    }

    fn is_idle(&self, time: usize) -> bool {
        self.free_at <= time
    }

    /// Starts the next pass whose input is ready: a forward below the in-flight limit, else a backward. Returns true if
    /// one started.
    fn start(&mut self, time: usize, done: &Done) -> bool {
        if !self.is_idle(time) {
            return false;
        }
        let may_forward = self.n_forwards - self.n_backwards < self.max_in_flight;
        let step = match (self.forwards.get(self.n_forwards), self.backwards.get(self.n_backwards)) {
            (Some(&pass), _) if may_forward => {
                if !done.can_forward(self.stage, pass, self.n_stages, time) {
                    return false;
                }
                self.n_forwards += 1;
                StageStep::Forward(pass)
            }
            (_, Some(&pass)) if done.can_backward(self.stage, pass, self.n_chunks, time) => {
                self.n_backwards += 1;
                StageStep::Backward(pass)
            }
            _ => return false,
        };
        self.steps.push((time, step));
        self.free_at = time + step.time();
        true
    }
}

/// Returns the passes of a stage in order: as many micro-batches as there are stages per model chunk, then the next
/// chunk.
fn passes(n_stages: usize, n_chunks: usize, n_micros: usize, chunk: impl Fn(usize) -> usize + Copy) -> Vec<ChunkPass> {
    let groups = (0..n_micros).step_by(n_stages);
    let of_group = |first: usize| {
        let micros = first..(first + n_stages).min(n_micros);
        (0..n_chunks).flat_map(move |i| micros.clone().map(move |micro| ChunkPass { chunk: chunk(i), micro }))
    };
    groups.flat_map(of_group).collect()
}

impl Done {
    fn new(sizes: [usize; 3]) -> Self {
        let n = sizes.iter().product();
        Self { sizes, forward: vec![None; n], backward: vec![None; n] }
    }

    fn at(&self, stage: usize, ChunkPass { chunk, micro }: ChunkPass) -> usize {
        let [_, n_chunks, n_micros] = self.sizes;
        (stage * n_chunks + chunk) * n_micros + micro
    }

    /// Records the end of a stage's last pass.
    fn note(&mut self, stage: &Stage) {
        let Some((begin, step)) = stage.steps.last() else { return };
        let end = Some(begin + step.time());
        match *step {
            StageStep::Forward(pass) => {
                let at = self.at(stage.stage, pass);
                self.forward[at] = end;
            }
            StageStep::Backward(pass) => {
                let at = self.at(stage.stage, pass);
                self.backward[at] = end;
            }
        }
    }

    /// Returns true if a forward's input is ready.
    fn can_forward(&self, stage: usize, pass: ChunkPass, n_stages: usize, time: usize) -> bool {
        let before = match (stage, pass.chunk) {
            (0, 0) => return true,
            (0, chunk) => (n_stages - 1, ChunkPass { chunk: chunk - 1, ..pass }),
            _ => (stage - 1, pass),
        };
        self.forward[self.at(before.0, before.1)].is_some_and(|end| end <= time)
    }

    /// Returns true if a backward's input is ready.
    fn can_backward(&self, stage: usize, pass: ChunkPass, n_chunks: usize, time: usize) -> bool {
        let [n_stages, ..] = self.sizes;
        let is_there = |end: Option<usize>| end.is_some_and(|end| end <= time);
        let after = match (stage + 1 == n_stages, pass.chunk + 1 == n_chunks) {
            (true, true) => return is_there(self.forward[self.at(stage, pass)]),
            (true, false) => (0, ChunkPass { chunk: pass.chunk + 1, ..pass }),
            (false, _) => (stage + 1, pass),
        };
        is_there(self.forward[self.at(stage, pass)]) && is_there(self.backward[self.at(after.0, after.1)])
    }
}

/// Prints one line per stage and one column per time unit, with the micro-batch number. Later chunks add a letter;
/// backwards are in brackets.
impl fmt::Display for PipelineSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = |ChunkPass { chunk, micro }: ChunkPass| match self.n_chunks {
            1 => micro.to_string(),
            _ => format!("{micro}{}", char::from(b'a' + (chunk % 26) as u8)),
        };
        let width = label(ChunkPass { chunk: 0, micro: self.n_micros.saturating_sub(1) }).len() + 3;
        for (stage, steps) in self.stages.iter().enumerate() {
            write!(f, "stage {stage:<3}")?;
            let mut time = 0;
            for (begin, step) in steps {
                write!(f, "{}", " ".repeat((begin - time) * width))?;
                let text = match *step {
                    StageStep::Forward(pass) => label(pass),
                    StageStep::Backward(pass) => format!("[{}]", label(pass)),
                };
                write!(f, "{text:^0$}", width * step.time())?;
                time = begin + step.time();
            }
            writeln!(f, "  {} live", self.max_in_flight(stage))?;
        }
        write!(f, "bubble {:.1} % of {} units", 100.0 * self.bubble(), self.duration())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use PipelineScheduleKind::{GPipe, OneForwardOneBackward};

    /// Checks a schedule: every pass runs once, after its inputs; a backward follows its forward; sender and receiver have one order.
    #[track_caller]
    fn check(schedule: PipelineScheduleKind, n_stages: usize, n_chunks: usize, n_micros: usize) -> PipelineSchedule {
        let table = PipelineSchedule::new(schedule, n_stages, n_chunks, n_micros);
        let mut ends = HashMap::new();
        for (stage, steps) in table.stages.iter().enumerate() {
            assert_eq!(steps.len(), 2 * n_chunks * n_micros);
            let mut free = 0;
            for (begin, step) in steps {
                assert!(*begin >= free, "one pass at a time");
                free = begin + step.time();
                let (pass, forward) = match *step {
                    StageStep::Forward(pass) => (pass, true),
                    StageStep::Backward(pass) => (pass, false),
                };
                assert!(ends.insert((stage + n_stages * pass.chunk, pass.micro, forward), (*begin, free)).is_none());
            }
        }
        let n_runs = n_stages * n_chunks;
        for (&(run, micro, forward), &(begin, _)) in &ends {
            let read = match (forward, run) {
                (true, 0) => continue,
                (true, _) => (run - 1, micro, true),
                (false, _) if run + 1 == n_runs => (run, micro, true),
                (false, _) => (run + 1, micro, false),
            };
            assert!(ends[&read].1 <= begin, "{schedule:?} {n_stages} {n_chunks} {n_micros}: {run} {micro} {forward}");
        }
        for forward in [true, false] {
            for run in 0..n_runs - 1 {
                // Passes of all model chunks cross the link between two stages. Sender and receiver must have one order.
                let order = |of: &dyn Fn(usize) -> bool, shift: usize| {
                    let mut passes: Vec<_> = ends
                        .iter()
                        .filter(|((run, _, way), _)| *way == forward && of(*run))
                        .map(|((run, micro, _), (begin, _))| (*begin, run - shift, *micro))
                        .collect();
                    passes.sort_unstable();
                    passes.into_iter().map(|(_, run, micro)| (run, micro)).collect::<Vec<_>>()
                };
                let of_edge = |r: usize| r % n_stages == run % n_stages;
                let lower = order(&|r| of_edge(r) && r + 1 < n_runs, 0);
                let upper = order(&|r| r > 0 && of_edge(r - 1), 1);
                assert_eq!(lower, upper, "{schedule:?} {n_stages} {n_chunks} {n_micros}, run {run}");
            }
        }
        table
    }

    #[test]
    fn every_table_is_complete_and_in_order() {
        for schedule in [GPipe, OneForwardOneBackward] {
            for n_stages in 1..=4 {
                for n_chunks in 1..=3 {
                    for n_micros in 0..=9 {
                        check(schedule, n_stages, n_chunks, n_micros);
                    }
                }
            }
        }
    }

    /// The bubble is (p - 1) / (m + p - 1), and v times smaller with v model chunks per stage.
    #[test]
    fn bubbles_are_those_of_the_papers() {
        let bubble = |schedule, p, v, m| check(schedule, p, v, m).bubble();
        for (p, m) in [(2, 2), (4, 4), (4, 8), (3, 7)] {
            let want = (p - 1) as f64 / (m + p - 1) as f64;
            assert!((bubble(OneForwardOneBackward, p, 1, m) - want).abs() < 1e-12, "{p} {m}");
            assert!((bubble(GPipe, p, 1, m) - want).abs() < 1e-12, "{p} {m}");
        }
        for (p, v, m) in [(2, 2, 4), (4, 2, 8), (4, 3, 8)] {
            let want = (p - 1) as f64 / (m * v + p - 1) as f64;
            assert!(
                (bubble(OneForwardOneBackward, p, v, m) - want).abs() < 1e-12,
                "{p} {v} {m}: {}",
                bubble(OneForwardOneBackward, p, v, m)
            );
        }
    }

    #[test]
    fn one_forward_one_backward_keeps_as_many_as_there_are_stages() {
        let live = |schedule, m| (0..4).map(|stage| check(schedule, 4, 1, m).max_in_flight(stage)).collect::<Vec<_>>();
        assert_eq!(live(OneForwardOneBackward, 8), [4, 3, 2, 1]);
        assert_eq!(live(GPipe, 8), [8, 8, 8, 8]);
        assert_eq!(live(OneForwardOneBackward, 2), [2, 2, 2, 1]);
    }

    #[test]
    fn a_schedule_is_printed_as_a_table() {
        let drawn = PipelineSchedule::new(OneForwardOneBackward, 2, 1, 3).to_string();
        let lines: Vec<&str> = drawn.lines().map(str::trim_end).collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("stage 0") && lines[0].contains("[0]") && lines[0].ends_with("2 live"), "{drawn}");
        assert!(lines[1].ends_with("1 live") && lines[2] == "bubble 25.0 % of 12 units", "{drawn}");
    }
}
