//! The heartbeat that a rank leaves in a store, and the rank that keeps a call from its end.

use std::collections::BTreeMap;

use crate::{Call, Op};

/// A rank's sign of life, with the call that each of its groups began last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Heartbeat {
    /// The number of this heartbeat.
    pub(crate) count: u64,
    /// True while work of its own keeps the rank from its next call.
    pub(crate) is_busy: bool,
    /// By the groups' ids.
    last_calls: BTreeMap<String, LastCall>,
}

/// The last call that a group began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct LastCall {
    /// The number of collective calls that it has begun.
    n_calls: u64,
    /// The last call, as text.
    call: String,
}

/// A call of a group that does not end, as rank `own` of the group sees it.
pub(crate) struct StalledCall<'a> {
    pub(crate) call: &'a Call,
    pub(crate) group_id: &'a str,
    /// The names of the group's ranks.
    pub(crate) names: &'a [String],
    pub(crate) own: usize,
}

impl Heartbeat {
    /// Notes that a group begins a call.
    pub(crate) fn record(&mut self, id: &str, call: &Call) {
        let last = self.last_calls.entry(id.to_owned()).or_default();
        if !matches!(call.op, Op::SendRecv { .. }) {
            last.n_calls = call.number;
        }
        last.call = call.to_string();
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let line = |(id, LastCall { n_calls, call }): (&String, &LastCall)| format!("\n{id}\t{n_calls}\t{call}");
        let lines: String = self.last_calls.iter().map(line).collect();
        format!("{} {}{lines}", self.count, self.is_busy).into_bytes()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(bytes);
        let mut lines = text.split('\n');
        let (count, is_busy) = lines.next()?.split_once(' ')?;
        let (count, is_busy) = (count.parse().ok()?, is_busy.parse().ok()?);
        let last_call = |line: &str| {
            let mut words = line.splitn(3, '\t');
            let (id, n_calls) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
            Some((id, LastCall { n_calls, call: words.next()?.to_owned() }))
        };
        Some(Self { count, is_busy, last_calls: lines.map(last_call).collect::<Option<_>>()? })
    }
}

impl StalledCall<'_> {
    /// Returns the rank of the group that keeps the call from its end, and the reason. `heartbeats` are two of each rank's,
    /// some time apart. Returns nothing while another rank is busy.
    pub(crate) fn diagnose(&self, heartbeats: &[[Option<Heartbeat>; 2]]) -> Option<(usize, String)> {
        let latest: Vec<_> = heartbeats.iter().map(|[_, latest]| latest.as_ref()).collect();
        let others: Vec<usize> = (0..self.names.len()).filter(|rank| *rank != self.own).collect();
        if let Some(dead) = others.iter().find(|rank| heartbeats[**rank][0] == heartbeats[**rank][1]) {
            return Some((*dead, format!("{} shows no sign of life", self.names[*dead])));
        }
        if others.iter().any(|rank| latest[*rank].is_some_and(|heartbeat| heartbeat.is_busy)) {
            return None;
        }
        let last_calls: Vec<_> =
            latest.iter().map(|heartbeat| heartbeat.as_ref()?.last_calls.get(self.group_id)).collect();
        Some(match self.call.op {
            Op::SendRecv { to, from } => self.diagnose_send(from.or(to).unwrap_or(self.own), &last_calls),
            _ => self.diagnose_collective(&others, &last_calls),
        })
    }

    fn diagnose_send(&self, peer: usize, last_calls: &[Option<&LastCall>]) -> (usize, String) {
        (peer, format!("{}, which {}, has not done its part", self.names[peer], last_call(last_calls[peer])))
    }

    fn diagnose_collective(&self, others: &[usize], last_calls: &[Option<&LastCall>]) -> (usize, String) {
        let (names, number) = (self.names, self.call.number);
        let behind = others.iter().find(|rank| last_calls[**rank].is_none_or(|last| last.n_calls < number));
        if let Some(&behind) = behind {
            return (behind, format!("{} has not begun it: it {}", names[behind], last_call(last_calls[behind])));
        }
        let own_call = self.call.to_string();
        let with_calls = others.iter().filter_map(|rank| Some((*rank, last_calls[*rank]?)));
        let other = with_calls.into_iter().find(|(_, last)| last.n_calls == number && last.call != own_call);
        match other {
            Some((rank, LastCall { call: theirs, .. })) => {
                (rank, format!("{} calls {own_call}, {} calls {theirs}", names[self.own], names[rank]))
            }
            None => (self.own, "all ranks have begun it; the GPUs, or what connects them, hang".to_owned()),
        }
    }
}

fn last_call(last: Option<&LastCall>) -> String {
    last.map_or_else(|| "has begun no call yet".to_owned(), |last| format!("began {} last", last.call))
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;
    use crate::Reduce;

    fn call(number: u64, op: Op) -> Call {
        Call { group: "world".into(), number, op, dtype: Some(candle_core::DType::F32), shape: vec![3] }
    }

    fn heartbeat(count: u64, begun: &[Call]) -> Option<Heartbeat> {
        let mut heartbeat = Heartbeat { count, ..Heartbeat::default() };
        begun.iter().for_each(|call| heartbeat.record("world", call));
        Some(heartbeat)
    }

    #[test]
    fn a_heartbeat_is_read_as_it_was_written() {
        let both = vec![call(3, Op::AllReduce(Reduce::Sum)), call(1, Op::SendRecv { to: Some(1), from: None })];
        for begun in [vec![], both] {
            let heartbeat = heartbeat(7, &begun);
            assert_eq!(Heartbeat::decode(&heartbeat.clone().unwrap_or_default().encode()), heartbeat);
        }
        assert_eq!(Heartbeat::decode(b"7 maybe"), None);
        assert_eq!(Heartbeat::decode(b"7 true\nworld"), None);
    }

    /// Checks why rank 0's third call of three ranks does not end.
    #[track_caller]
    fn check(op: Op, others: [[Option<Heartbeat>; 2]; 2], want: Option<(usize, &str)>) {
        let third = call(3, op);
        let [one, two] = others;
        let own = [heartbeat(1, from_ref(&third)), heartbeat(4, from_ref(&third))];
        let names = ["rank 0", "rank 1", "rank 2"].map(str::to_owned);
        let stalled = StalledCall { call: &third, group_id: "world", names: &names, own: 0 };
        let diagnosis = stalled.diagnose(&[own, one, two]);
        assert_eq!(diagnosis.as_ref().map(|(rank, why)| (*rank, why.as_str())), want);
    }

    #[test]
    fn the_rank_that_is_behind_is_named() {
        let sum = Op::AllReduce(Reduce::Sum);
        let at = |number| [heartbeat(1, &[call(number, sum)]), heartbeat(4, &[call(number, sum)])];
        let dead = [heartbeat(1, &[call(3, sum)]), heartbeat(1, &[call(3, sum)])];
        check(sum, [at(3), dead.clone()], Some((2, "rank 2 shows no sign of life")));
        check(sum, [at(3), [None, None]], Some((2, "rank 2 shows no sign of life")));
        let behind = "rank 1 has not begun it: it began all_reduce 2 (sum, f32 [3]) last";
        check(sum, [at(2), at(3)], Some((1, behind)));
        let busy = at(2).map(|heartbeat| Some(Heartbeat { is_busy: true, ..heartbeat? }));
        check(sum, [busy.clone(), at(3)], None);
        check(sum, [busy, dead], Some((2, "rank 2 shows no sign of life")));
        let nothing = "rank 1 has not begun it: it has begun no call yet";
        check(sum, [[heartbeat(1, &[]), heartbeat(4, &[])], at(3)], Some((1, nothing)));
        let gather = [heartbeat(1, &[call(3, Op::AllGather)]), heartbeat(4, &[call(3, Op::AllGather)])];
        let both = "rank 0 calls all_reduce 3 (sum, f32 [3]), rank 2 calls all_gather 3 (f32 [3])";
        check(sum, [at(3), gather], Some((2, both)));
        let hang = "all ranks have begun it; the GPUs, or what connects them, hang";
        check(sum, [at(3), at(5)], Some((0, hang)));
        let receive = Op::SendRecv { to: None, from: Some(2) };
        let idle = "rank 2, which began all_reduce 2 (sum, f32 [3]) last, has not done its part";
        check(receive, [at(3), at(2)], Some((2, idle)));
        let nothing = "rank 2, which has begun no call yet, has not done its part";
        check(receive, [at(3), [heartbeat(1, &[]), heartbeat(4, &[])]], Some((2, nothing)));
    }
}
