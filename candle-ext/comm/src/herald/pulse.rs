//! A rank's sign of life: that it lives, and which call each of its groups began last.

use std::collections::BTreeMap;

use crate::{Call, Op};

/// What a rank leaves in the store from time to time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pulse {
    /// Another one each time.
    pub(super) beat: u64,
    /// Whether it is at work on something that keeps it from its next call.
    pub(super) is_at_work: bool,
    /// By the groups' ids.
    pub(super) begun: BTreeMap<String, Begun>,
}

/// The last call that a group began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Begun {
    /// How many calls of all its ranks it has begun.
    n_calls: u64,
    /// The last of them, in words.
    call: String,
}

impl Pulse {
    /// Notes that a group begins a call.
    pub(super) fn note(&mut self, id: &str, call: &Call) {
        let begun = self.begun.entry(id.to_owned()).or_default();
        if !matches!(call.op, Op::SendRecv { .. }) {
            begun.n_calls = call.number;
        }
        begun.call = call.to_string();
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let line = |(id, Begun { n_calls, call }): (&String, &Begun)| format!("\n{id}\t{n_calls}\t{call}");
        let lines: String = self.begun.iter().map(line).collect();
        format!("{} {}{lines}", self.beat, self.is_at_work).into_bytes()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(bytes);
        let mut lines = text.split('\n');
        let (beat, is_at_work) = lines.next()?.split_once(' ')?;
        let (beat, is_at_work) = (beat.parse().ok()?, is_at_work.parse().ok()?);
        let group = |line: &str| {
            let mut words = line.splitn(3, '\t');
            let (id, n_calls) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
            Some((id, Begun { n_calls, call: words.next()?.to_owned() }))
        };
        Some(Self { beat, is_at_work, begun: lines.map(group).collect::<Option<_>>()? })
    }
}

/// Says why `call` of group `id` does not end: the first of its ranks to blame, as a place among `names`, and what is known
/// of it. `pulses` are two of each rank's, a while apart; `own` is the rank that asks. Nobody is to blame while one of them is
/// at work.
pub(super) fn blame(
    call: &Call,
    id: &str,
    names: &[String],
    own: usize,
    pulses: &[[Option<Pulse>; 2]],
) -> Option<(usize, String)> {
    let others = || (0..names.len()).filter(|rank| *rank != own);
    if let Some(dead) = others().find(|rank| pulses[*rank][0] == pulses[*rank][1]) {
        return Some((dead, format!("{} shows no sign of life", names[dead])));
    }
    if others().any(|rank| pulses[rank][1].as_ref().is_some_and(|pulse| pulse.is_at_work)) {
        return None;
    }
    let begun = |rank: usize| pulses[rank][1].as_ref()?.begun.get(id).cloned();
    let last = |rank: usize| match begun(rank) {
        Some(begun) => format!("began {} last", begun.call),
        None => "has begun no call yet".to_owned(),
    };
    if matches!(call.op, Op::SendRecv { .. }) {
        let Op::SendRecv { to, from } = call.op else { unreachable!("it was looked at above") };
        let peer = from.or(to).unwrap_or(own);
        return Some((peer, format!("{}, which {}, has not done its part", names[peer], last(peer))));
    }
    let behind = others().find(|rank| begun(*rank).is_none_or(|begun| begun.n_calls < call.number));
    if let Some(behind) = behind {
        return Some((behind, format!("{} has not begun it: it {}", names[behind], last(behind))));
    }
    let other = others()
        .find(|rank| begun(*rank).is_some_and(|begun| begun.n_calls == call.number && begun.call != call.to_string()));
    Some(match other.and_then(|rank| Some((rank, begun(rank)?.call))) {
        Some((rank, theirs)) => (rank, format!("{} calls {call}, {} calls {theirs}", names[own], names[rank])),
        None => (own, "all ranks have begun it; the GPUs, or what connects them, hang".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;
    use crate::Reduce;

    fn call(number: u64, op: Op) -> Call {
        Call { group: "world".into(), number, op, dtype: Some(candle_core::DType::F32), shape: vec![3] }
    }

    fn pulse(beat: u64, begun: &[Call]) -> Option<Pulse> {
        let mut pulse = Pulse { beat, ..Pulse::default() };
        begun.iter().for_each(|call| pulse.note("world", call));
        Some(pulse)
    }

    #[test]
    fn a_pulse_is_read_as_it_was_written() {
        let both = vec![call(3, Op::AllReduce(Reduce::Sum)), call(1, Op::SendRecv { to: Some(1), from: None })];
        for begun in [vec![], both] {
            let pulse = pulse(7, &begun);
            assert_eq!(Pulse::decode(&pulse.clone().unwrap_or_default().encode()), pulse);
        }
        assert_eq!(Pulse::decode(b"7 maybe"), None);
        assert_eq!(Pulse::decode(b"7 true\nworld"), None);
    }

    /// Why rank 0's third call of three ranks does not end.
    #[track_caller]
    fn check(op: Op, others: [[Option<Pulse>; 2]; 2], want: Option<(usize, &str)>) {
        let third = call(3, op);
        let [one, two] = others;
        let own = [pulse(1, from_ref(&third)), pulse(4, from_ref(&third))];
        let names = ["rank 0", "rank 1", "rank 2"].map(str::to_owned);
        let blamed = blame(&third, "world", &names, 0, &[own, one, two]);
        assert_eq!(blamed.as_ref().map(|(rank, why)| (*rank, why.as_str())), want);
    }

    #[test]
    fn the_rank_that_is_behind_is_named() {
        let sum = Op::AllReduce(Reduce::Sum);
        let at = |number| [pulse(1, &[call(number, sum)]), pulse(4, &[call(number, sum)])];
        let dead = [pulse(1, &[call(3, sum)]), pulse(1, &[call(3, sum)])];
        check(sum, [at(3), dead.clone()], Some((2, "rank 2 shows no sign of life")));
        check(sum, [at(3), [None, None]], Some((2, "rank 2 shows no sign of life")));
        let behind = "rank 1 has not begun it: it began all_reduce 2 (sum, f32 [3]) last";
        check(sum, [at(2), at(3)], Some((1, behind)));
        let busy = at(2).map(|pulse| Some(Pulse { is_at_work: true, ..pulse? }));
        check(sum, [busy.clone(), at(3)], None);
        check(sum, [busy, dead], Some((2, "rank 2 shows no sign of life")));
        let nothing = "rank 1 has not begun it: it has begun no call yet";
        check(sum, [[pulse(1, &[]), pulse(4, &[])], at(3)], Some((1, nothing)));
        let gather = [pulse(1, &[call(3, Op::AllGather)]), pulse(4, &[call(3, Op::AllGather)])];
        let both = "rank 0 calls all_reduce 3 (sum, f32 [3]), rank 2 calls all_gather 3 (f32 [3])";
        check(sum, [at(3), gather], Some((2, both)));
        let hang = "all ranks have begun it; the GPUs, or what connects them, hang";
        check(sum, [at(3), at(5)], Some((0, hang)));
        let receive = Op::SendRecv { to: None, from: Some(2) };
        let idle = "rank 2, which began all_reduce 2 (sum, f32 [3]) last, has not done its part";
        check(receive, [at(3), at(2)], Some((2, idle)));
        let nothing = "rank 2, which has begun no call yet, has not done its part";
        check(receive, [at(3), [pulse(1, &[]), pulse(4, &[])]], Some((2, nothing)));
    }
}
