//! Chrome's trace event format, as Perfetto and `chrome://tracing` read it:
//! <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.
//!
//! Spans are complete events (`X`), names of process and tracks are metadata (`M`), the speed of the link
//! is a counter (`C`). Times are µs since the first span: their fraction holds the nanoseconds exactly,
//! also in readers that know only 64-bit floats. `otherData.origin_ns` brings back the clock.

use super::{Span, Trace, Track};
use serde::{Deserialize, Serialize};

/// The only process.
const PID: u32 = 1;
/// Written into the file, and looked for when one is read.
const PROGRAM: &str = "vkmoe";
/// Largest time that µs in a float bring back to the nanosecond, though each of writing, parsing and
/// scaling rounds: six days.
const MAX_NS: f64 = (1u64 << 49) as f64;
/// Characters of a foreign text that a message repeats.
const SHOWN_CHARS: usize = 160;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct File<'a> {
    display_time_unit: &'a str,
    other_data: OtherData,
    trace_events: Vec<Event<'a>>,
}

#[derive(Serialize, Deserialize)]
struct OtherData {
    program: String,
    model: String,
    device: String,
    origin_ns: u64,
}

#[derive(Serialize)]
struct Event<'a> {
    ph: &'a str,
    pid: u32,
    tid: u32,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Args<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Args<'a> {
    Name { name: &'a str },
    Order { sort_index: u32 },
    Link { gbps: f64 },
    Span(SpanArgs),
}

#[derive(Serialize, Deserialize, Default)]
struct SpanArgs {
    #[serde(skip_serializing_if = "Option::is_none")]
    layer: Option<u32>,
    #[serde(default, skip_serializing_if = "is_zero")]
    bytes: u64,
    /// For the reader; computed anew from the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gbps: Option<f64>,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

pub(super) fn write(trace: &Trace) -> String {
    let origin_ns = trace.bounds().map_or(0, |(start, _)| start);
    let process = format!("{} · {}", trace.model, trace.device);
    let mut events = vec![metadata("process_name", 0, Args::Name { name: &process })];
    for track in Track::ALL {
        events.push(metadata("thread_name", tid(track), Args::Name { name: track.name() }));
        events.push(metadata(
            "thread_sort_index",
            tid(track),
            Args::Order { sort_index: tid(track) },
        ));
    }
    events.extend(trace.spans.iter().map(|span| complete(span, origin_ns)));
    events.extend(link_speed(trace).into_iter().map(|(ns, gbps)| counter(ns - origin_ns, gbps)));
    let (model, device) = (trace.model.clone(), trace.device.clone());
    let file = File {
        display_time_unit: "ms",
        other_data: OtherData { program: PROGRAM.into(), model, device, origin_ns },
        trace_events: events,
    };
    // Strings and finite numbers always serialize.
    serde_json::to_string(&file).unwrap_or_default() + "\n"
}

fn metadata<'a>(name: &'a str, tid: u32, args: Args<'a>) -> Event<'a> {
    Event { ph: "M", pid: PID, tid, name, ts: None, dur: None, args }
}

fn complete(span: &Span, origin_ns: u64) -> Event<'_> {
    let gbps = span.gbps().map(rounded);
    Event {
        ph: "X",
        pid: PID,
        tid: tid(span.track),
        name: &span.name,
        ts: Some(micros(span.start_ns - origin_ns)),
        dur: Some(micros(span.duration_ns())),
        args: Args::Span(SpanArgs { layer: span.il, bytes: span.bytes, gbps }),
    }
}

fn counter(ns: u64, gbps: f64) -> Event<'static> {
    let (ts, args) = (Some(micros(ns)), Args::Link { gbps: rounded(gbps) });
    Event { ph: "C", pid: PID, tid: 0, name: "link GB/s", ts, dur: None, args }
}

/// Steps (time, GB/s from then on): the sum of the copies that run.
fn link_speed(trace: &Trace) -> Vec<(u64, f64)> {
    let copies = trace.on(Track::Copy).filter_map(|span| Some((span, span.gbps()?)));
    let mut changes: Vec<(u64, f64)> =
        copies.flat_map(|(s, gbps)| [(s.start_ns, gbps), (s.end_ns, -gbps)]).collect();
    changes.sort_by_key(|&(ns, _)| ns);
    let mut steps: Vec<(u64, f64)> = Vec::new();
    let mut speed = 0.0;
    for (ns, change) in changes {
        // Rounding leaves a little more or less than nothing.
        speed = f64::max(speed + change, 0.0);
        match steps.last_mut() {
            Some(last) if last.0 == ns => last.1 = speed,
            _ => steps.push((ns, speed)),
        }
    }
    steps
}

/// Threads are numbered from 1 in the order of [`Track::ALL`].
fn tid(track: Track) -> u32 {
    track as u32 + 1
}

fn micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}

fn rounded(gbps: f64) -> f64 {
    (gbps * 100.0).round() / 100.0
}

/// What is read of a file; more is ignored.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReadFile {
    other_data: OtherData,
    trace_events: Vec<ReadEvent>,
}

#[derive(Deserialize)]
struct ReadEvent {
    ph: String,
    name: String,
    #[serde(default)]
    tid: u32,
    ts: Option<f64>,
    dur: Option<f64>,
    #[serde(default)]
    args: SpanArgs,
}

pub(super) fn read(text: &str) -> Result<Trace, String> {
    let file: ReadFile = serde_json::from_str(text)
        .map_err(|e| format!("this is no trace of vkmoe: {}", shown(&e.to_string())))?;
    let OtherData { program, model, device, origin_ns } = file.other_data;
    if program != PROGRAM {
        return Err(format!("this is a trace of `{}`, not of vkmoe", shown(&program)));
    }
    let complete = file.trace_events.into_iter().enumerate().filter(|(_, event)| event.ph == "X");
    let span = |(i, event): (usize, ReadEvent)| {
        let place = format!("event {i} (`{}`)", shown(&event.name));
        span(event, origin_ns).map_err(|problem| format!("{place}: {problem}"))
    };
    let spans = complete.map(span).collect::<Result<_, _>>()?;
    Ok(Trace { model, device, spans })
}

fn span(event: ReadEvent, origin_ns: u64) -> Result<Span, String> {
    let track = Track::ALL
        .into_iter()
        .find(|&track| tid(track) == event.tid)
        .ok_or_else(|| format!("tid {} is none of 1 to {}", event.tid, Track::ALL.len()))?;
    let late = || "it is later than any clock counts".to_string();
    let start_ns = origin_ns.checked_add(nanos("ts", event.ts)?).ok_or_else(late)?;
    let end_ns = start_ns.checked_add(nanos("dur", event.dur)?).ok_or_else(late)?;
    let SpanArgs { layer: il, bytes, .. } = event.args;
    Ok(Span { track, name: event.name, il, start_ns, end_ns, bytes })
}

fn nanos(key: &str, micros: Option<f64>) -> Result<u64, String> {
    let micros = micros.ok_or_else(|| format!("`{key}` is missing"))?;
    let ns = (micros * 1e3).round();
    match (0.0..=MAX_NS).contains(&ns) {
        true => Ok(ns as u64),
        false => {
            Err(format!("`{key}` is {micros:?}; µs from 0 to {:.0} are possible", MAX_NS / 1e3))
        }
    }
}

/// A text of the file for a message: not more than a line of it.
fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn events_are_what_perfetto_reads() {
        let file: Value = serde_json::from_str(&samples::prefill(2).to_json()).unwrap();
        assert_eq!(file["displayTimeUnit"], "ms");
        let events = file["traceEvents"].as_array().unwrap();
        let named = |name: &str| events.iter().find(|e| e["name"] == name).unwrap().clone();
        assert_eq!(named("process_name")["ph"], "M");
        let copy = json!({
            "ph": "X", "pid": 1, "tid": 2, "name": "blk.0.ffn_up_exps",
            "ts": 2300.123, "dur": 2300.123,
            "args": {"layer": 0, "bytes": 115_000_000, "gbps": 50.0},
        });
        assert_eq!(named("blk.0.ffn_up_exps"), copy);
        let threads: Vec<_> = events.iter().filter(|e| e["name"] == "thread_name").collect();
        assert_eq!(threads.len(), Track::ALL.len());
        assert_eq!((&threads[1]["tid"], &threads[1]["args"]["name"]), (&json!(2), &json!("copy")));
        let counters = events.iter().filter(|e| e["ph"] == "C").map(|e| &e["args"]["gbps"]);
        let counters: Vec<_> = counters.map(|gbps| gbps.as_f64().unwrap()).collect();
        // A step where each of six copies begins, and one back to nothing.
        assert_eq!(counters.len(), 7);
        assert_eq!((counters[0], counters[6]), (50.0, 0.0));
    }

    fn with(key: &str, value: Value) -> String {
        let mut file: Value = serde_json::from_str(&samples::prefill(1).to_json()).unwrap();
        let events = file["traceEvents"].as_array_mut().unwrap();
        let event = events.iter_mut().find(|event| event["ph"] == "X").unwrap();
        match value {
            Value::Null => drop(event.as_object_mut().unwrap().remove(key)),
            value => event[key] = value,
        }
        file.to_string()
    }

    #[test]
    fn malformed_files_are_refused_in_one_line_that_says_where() {
        let good = samples::prefill(1).to_json();
        let other = good.replace("\"program\":\"vkmoe\"", "\"program\":\"a\\nb\"");
        let cases = [
            (String::new(), "EOF"),
            ("[]".into(), "no trace of vkmoe"),
            ("{}".into(), "otherData"),
            (r#"{"traceEvents": []}"#.into(), "otherData"),
            (good[..good.len() / 2].to_owned(), "EOF"),
            (format!("{good}x"), "trailing"),
            ("[".repeat(100_000), "no trace"),
            (other, "trace of `a\nb`"),
            (with("ts", Value::Null), "event 7 (`blk.0 attention`): `ts` is missing"),
            (with("dur", json!(-1)), "event 7 (`blk.0 attention`): `dur` is -1"),
            (with("ts", json!(1e300)), "`ts` is 1"),
            (with("ts", json!("now")), "no trace"),
            (with("tid", json!(4)), "tid 4 is none of 1 to 3"),
            (with("tid", json!(-4)), "no trace"),
            (with("name", json!("x".repeat(1 << 20))), ""),
            (with("args", json!({"layer": 4_294_967_296u64})), "no trace"),
            (with("args", json!({"bytes": -5})), "no trace"),
        ];
        for (text, words) in cases {
            let Err(problem) = Trace::from_json(&text) else {
                assert!(words.is_empty(), "{words} was expected");
                continue;
            };
            assert!(problem.contains(words) && !words.is_empty(), "{problem}");
            assert!(problem.chars().count() < 300, "{problem}");
        }
    }

    #[test]
    fn a_clock_that_runs_out_is_refused() {
        let trace = Trace { spans: samples::prefill(1).spans, ..Trace::default() };
        let origin = format!("\"origin_ns\":{}", u64::MAX);
        let text = trace.to_json().replace("\"origin_ns\":1000000", &origin);
        assert!(Trace::from_json(&text).unwrap_err().contains("later than any clock"));
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(trace in samples::any_trace()) {
            prop_assert_eq!(Trace::from_json(&trace.to_json()).unwrap(), trace);
        }

        #[test]
        fn long_runs_are_exact(start_ns in 0u64..1 << 49, duration_ns in 0u64..1 << 49) {
            let mut trace = samples::prefill(1);
            trace.spans[1].start_ns = start_ns;
            trace.spans[1].end_ns = start_ns + duration_ns;
            prop_assert_eq!(Trace::from_json(&trace.to_json()).unwrap(), trace);
        }

        #[test]
        fn damaged_text_is_an_answer_not_a_panic(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut text = samples::prefill(2).to_json().into_bytes();
            let at = at.index(text.len());
            text[at] = byte;
            if let Err(problem) = Trace::from_json(&String::from_utf8_lossy(&text)) {
                prop_assert!(!problem.is_empty());
            }
        }
    }
}
