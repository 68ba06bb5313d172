//! Heartbeat of a rank in the store, and the diagnosis of a stalled call from all ranks' heartbeats.

use std::collections::BTreeMap;

use crate::{CollectiveCall, Op};

/// Record of a rank's heartbeat in the store, with the last call of each of its groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeartbeatRecord {
    /// Sequence number of the heartbeat.
    pub(crate) count: u64,
    /// True while the rank is busy between two calls.
    pub(crate) is_busy: bool,
    /// Last calls by group id.
    last_calls: BTreeMap<String, LastCall>,
}

/// Last call that a group has entered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct LastCall {
    /// Number of collective calls that the group has entered.
    n_calls: u64,
    /// Text of the last call.
    call: String,
}

/// Stalled call of a group, seen by rank `own` of the group.
pub(crate) struct StalledCall<'a> {
    pub(crate) call: &'a CollectiveCall,
    pub(crate) group_id: &'a str,
    /// Names of the group's ranks.
    pub(crate) names: &'a [String],
    pub(crate) own: usize,
}

impl HeartbeatRecord {
    /// Records that a group enters a call.
    pub(crate) fn record(&mut self, id: &str, call: &CollectiveCall) {
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
    /// Returns the rank of the group because of which the call stalls, and the reason.
    ///
    /// `heartbeats` are two of each rank, some time apart. Returns `None` while another rank is busy.
    pub(crate) fn diagnose(&self, heartbeats: &[[Option<HeartbeatRecord>; 2]]) -> Option<(usize, String)> {
        let latest: Vec<_> = heartbeats.iter().map(|[_, latest]| latest.as_ref()).collect();
        let others: Vec<usize> = (0..self.names.len()).filter(|rank| *rank != self.own).collect();
        if let Some(dead) = others.iter().find(|rank| heartbeats[**rank][0] == heartbeats[**rank][1]) {
            return Some((*dead, format!("{} sends no heartbeats", self.names[*dead])));
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
        (peer, format!("{} has not entered the matching send_recv; {}", self.names[peer], last_call(last_calls[peer])))
    }

    fn diagnose_collective(&self, others: &[usize], last_calls: &[Option<&LastCall>]) -> (usize, String) {
        let (names, number) = (self.names, self.call.number);
        let late = others.iter().find(|rank| last_calls[**rank].is_none_or(|last| last.n_calls < number));
        if let Some(&late) = late {
            return (late, format!("{} has not entered the call; {}", names[late], last_call(last_calls[late])));
        }
        let own_call = self.call.to_string();
        let with_calls = others.iter().filter_map(|rank| Some((*rank, last_calls[*rank]?)));
        let other = with_calls.into_iter().find(|(_, last)| last.n_calls == number && last.call != own_call);
        match other {
            Some((rank, LastCall { call: theirs, .. })) => {
                (rank, format!("{} calls {own_call}, {} calls {theirs}", names[self.own], names[rank]))
            }
            None => (self.own, "all ranks have entered the call; a GPU or the interconnect hangs".to_owned()),
        }
    }
}

fn last_call(last: Option<&LastCall>) -> String {
    last.map_or_else(|| "it has made no call yet".to_owned(), |last| format!("its last call was {}", last.call))
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;
    use crate::Reduce;

    fn call(number: u64, op: Op) -> CollectiveCall {
        CollectiveCall { group: "world".into(), number, op, dtype: Some(candle_core::DType::F32), shape: vec![3] }
    }

    fn heartbeat(count: u64, begun: &[CollectiveCall]) -> Option<HeartbeatRecord> {
        let mut heartbeat = HeartbeatRecord { count, ..HeartbeatRecord::default() };
        begun.iter().for_each(|call| heartbeat.record("world", call));
        Some(heartbeat)
    }

    #[test]
    fn a_decoded_heartbeat_equals_the_encoded_heartbeat() {
        let both = vec![call(3, Op::AllReduce(Reduce::Sum)), call(1, Op::SendRecv { to: Some(1), from: None })];
        for begun in [vec![], both] {
            let heartbeat = heartbeat(7, &begun);
            assert_eq!(HeartbeatRecord::decode(&heartbeat.clone().unwrap_or_default().encode()), heartbeat);
        }
        assert_eq!(HeartbeatRecord::decode(b"7 maybe"), None);
        assert_eq!(HeartbeatRecord::decode(b"7 true\nworld"), None);
    }

    /// Checks the diagnosis of rank 0's stalled third call in a group of three ranks.
    #[track_caller]
    fn check(op: Op, others: [[Option<HeartbeatRecord>; 2]; 2], want: Option<(usize, &str)>) {
        let third = call(3, op);
        let [one, two] = others;
        let own = [heartbeat(1, from_ref(&third)), heartbeat(4, from_ref(&third))];
        let names = ["rank 0", "rank 1", "rank 2"].map(str::to_owned);
        let stalled = StalledCall { call: &third, group_id: "world", names: &names, own: 0 };
        let diagnosis = stalled.diagnose(&[own, one, two]);
        assert_eq!(diagnosis.as_ref().map(|(rank, why)| (*rank, why.as_str())), want);
    }

    #[test]
    fn the_rank_that_stalls_a_call_is_named() {
        let sum = Op::AllReduce(Reduce::Sum);
        let at = |number| [heartbeat(1, &[call(number, sum)]), heartbeat(4, &[call(number, sum)])];
        let dead = [heartbeat(1, &[call(3, sum)]), heartbeat(1, &[call(3, sum)])];
        check(sum, [at(3), dead.clone()], Some((2, "rank 2 sends no heartbeats")));
        check(sum, [at(3), [None, None]], Some((2, "rank 2 sends no heartbeats")));
        let late = "rank 1 has not entered the call; its last call was all_reduce 2 (sum, f32 [3])";
        check(sum, [at(2), at(3)], Some((1, late)));
        let busy = at(2).map(|heartbeat| Some(HeartbeatRecord { is_busy: true, ..heartbeat? }));
        check(sum, [busy.clone(), at(3)], None);
        check(sum, [busy, dead], Some((2, "rank 2 sends no heartbeats")));
        let nothing = "rank 1 has not entered the call; it has made no call yet";
        check(sum, [[heartbeat(1, &[]), heartbeat(4, &[])], at(3)], Some((1, nothing)));
        let gather = [heartbeat(1, &[call(3, Op::AllGather)]), heartbeat(4, &[call(3, Op::AllGather)])];
        let both = "rank 0 calls all_reduce 3 (sum, f32 [3]), rank 2 calls all_gather 3 (f32 [3])";
        check(sum, [at(3), gather], Some((2, both)));
        let hang = "all ranks have entered the call; a GPU or the interconnect hangs";
        check(sum, [at(3), at(5)], Some((0, hang)));
        let receive = Op::SendRecv { to: None, from: Some(2) };
        let idle = "rank 2 has not entered the matching send_recv; its last call was all_reduce 2 (sum, f32 [3])";
        check(receive, [at(3), at(2)], Some((2, idle)));
        let nothing = "rank 2 has not entered the matching send_recv; it has made no call yet";
        check(receive, [at(3), [heartbeat(1, &[]), heartbeat(4, &[])]], Some((2, nothing)));
    }
}
