//! Reading a TOML tree field by field, so that one mistake does not hide the next.
//!
//! A getter that finds a mistake notes it and returns the default; the caller goes on, and only a page
//! without mistakes becomes a configuration.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_spanned::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};
use zeroize::Zeroizing;

use super::commands::{Given, SecretCommand};
use super::errors::{Mistake, Source, Span, is_plain_path, is_plain_variable, shown};
use super::secrets::{self, Shape};
use super::stamps::Stamps;
use super::{fields, values};
use crate::model::Secret;

/// A file that is being read, and what was found wrong with it so far.
pub(super) struct Page<'p> {
    source: Source<'p>,
    /// The directory that relative paths start from: the file's own.
    dir: PathBuf,
    env: &'p dyn Fn(&str) -> Option<String>,
    variables: RefCell<Vec<String>>,
    files: RefCell<Stamps>,
    /// What commands gave before.
    given: &'p Given,
    commands: RefCell<Vec<SecretCommand>>,
    mistakes: RefCell<Vec<(usize, Mistake)>>,
    warnings: RefCell<Vec<String>>,
}

/// A value, and where the file says it; a default is nowhere.
#[derive(Debug, Clone)]
pub(super) struct Said<T> {
    pub(super) value: T,
    pub(super) at: Option<Span>,
}

impl<'p> Page<'p> {
    pub(super) fn new(source: Source<'p>, dir: PathBuf, env: &'p dyn Fn(&str) -> Option<String>) -> Self {
        static NONE: Given = Given::none();
        let (mistakes, warnings) = (RefCell::default(), RefCell::default());
        let (variables, files, commands) = (RefCell::default(), RefCell::default(), RefCell::default());
        Self { source, dir, env, variables, files, given: &NONE, commands, mistakes, warnings }
    }

    /// The same, with what commands gave before.
    pub(super) fn with(mut self, given: &'p Given) -> Self {
        self.given = given;
        self
    }

    /// What a secret's command gave, if it has been run; else it is to be.
    pub(super) fn given(&self, command: SecretCommand) -> Option<Secret> {
        let secret = self.given.by(&command);
        self.commands.borrow_mut().push(command);
        secret
    }

    /// The commands that secrets come from.
    pub(super) fn commands(&self) -> Vec<SecretCommand> {
        self.commands.borrow().clone()
    }

    /// Notes a mistake at `at`.
    pub(super) fn refuse(&self, at: &Span, problem: impl AsRef<str>) {
        let mistake = self.source.mistake(at, problem.as_ref());
        self.mistakes.borrow_mut().push((at.start, mistake));
    }

    /// Notes what is odd but no mistake.
    pub(super) fn warn(&self, text: impl Into<String>) {
        self.warnings.borrow_mut().push(text.into());
    }

    /// The variables that secrets were read from so far.
    pub(super) fn secret_variables(&self) -> Vec<String> {
        self.variables.borrow().clone()
    }

    /// The files that were read so far.
    pub(super) fn files(&self) -> Stamps {
        self.files.borrow().clone()
    }

    /// A path of the file's: relative ones start from its directory.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.dir.join(path)
    }

    /// The same of a file that is read with this one: its change is a change of this one.
    pub(super) fn path_to_read(&self, path: &str) -> PathBuf {
        let path = self.path(path);
        self.files.borrow_mut().note(&path);
        path
    }

    /// The warnings, or all mistakes in the order of the file.
    pub(super) fn close(self) -> Result<Vec<String>, Vec<Mistake>> {
        let mut mistakes = self.mistakes.into_inner();
        if mistakes.is_empty() {
            return Ok(self.warnings.into_inner());
        }
        mistakes.sort_by_key(|(at, _)| *at);
        Err(mistakes.into_iter().map(|(_, mistake)| mistake).collect())
    }
}

/// One table of the file, or the lack of it.
pub(super) struct Table<'p> {
    pub(super) page: &'p Page<'p>,
    /// As messages name it: `lease`, `keys[0]`.
    pub(super) path: String,
    /// Its header.
    pub(super) at: Span,
    fields: Option<&'p DeTable<'p>>,
}

/// One field of a table.
pub(super) struct Field<'p> {
    pub(super) page: &'p Page<'p>,
    pub(super) path: String,
    pub(super) at: Span,
    pub(super) value: &'p DeValue<'p>,
}

impl<'p> Table<'p> {
    /// The whole document.
    pub(super) fn root(page: &'p Page<'p>, tree: &'p DeTable<'p>) -> Self {
        let table = Self::lenient_root(page, tree);
        table.check_fields("");
        table
    }

    /// The whole document, of which only some is of interest.
    pub(super) fn lenient_root(page: &'p Page<'p>, tree: &'p DeTable<'p>) -> Self {
        Self { page, path: String::new(), at: 0..0, fields: Some(tree) }
    }

    /// The section `name`; an absent one is all defaults.
    pub(super) fn section(&self, name: &str) -> Self {
        match self.get(name) {
            Some(field) => field.table(name).unwrap_or_else(|| self.absent(name)),
            None => self.absent(name),
        }
    }

    /// The section `name` as if it were not there.
    pub(super) fn absent(&self, name: &str) -> Self {
        Self { page: self.page, path: name.into(), at: self.at.clone(), fields: None }
    }

    fn check_fields(&self, kind: &str) {
        let known = fields::of(kind);
        for key in self.fields.into_iter().flat_map(DeTable::keys) {
            let word = key.get_ref().as_ref();
            if !known.contains(&word) {
                let hint = fields::hint(word, known.iter().copied());
                self.page.refuse(&key.span(), self.unknown(word, &hint));
            }
        }
    }

    /// Says that `word` is no field of this table.
    pub(super) fn unknown(&self, word: &str, hint: &str) -> String {
        let word = shown(word);
        let word = word.trim_matches('"');
        if self.path.is_empty() {
            format!("`{word}` is no section; {hint}")
        } else {
            format!("`{word}` is no field of {}; {hint}", self.path)
        }
    }

    /// The names and values of a table whose names are the user's own.
    pub(super) fn children(&self) -> impl Iterator<Item = (&'p str, Span, Field<'p>)> {
        let (page, path) = (self.page, self.path.clone());
        self.fields.into_iter().flatten().map(move |(key, value)| {
            let name: &str = key.get_ref();
            let shown = shown(name);
            let path = format!("{path}.{}", shown.trim_matches('"'));
            (name, key.span(), Field { page, path, at: value.span(), value: value.get_ref() })
        })
    }

    /// The field `name`, if it is there.
    pub(super) fn get(&self, name: &str) -> Option<Field<'p>> {
        let value = self.fields?.get(name)?;
        let path = if self.path.is_empty() { name.into() } else { format!("{}.{name}", self.path) };
        Some(Field { page: self.page, path, at: value.span(), value: value.get_ref() })
    }

    /// The field `name`, which must be there.
    pub(super) fn need(&self, name: &str) -> Option<Field<'p>> {
        let field = self.get(name);
        if field.is_none() {
            self.page.refuse(&self.at, format!("{} has no `{name}`", self.path));
        }
        field
    }

    fn read<T>(&self, name: &str, default: T, read: impl FnOnce(&Field<'p>) -> Option<T>) -> Said<T> {
        match self.get(name) {
            Some(field) => match read(&field) {
                Some(value) => Said { value, at: Some(field.at) },
                None => Said { value: default, at: None },
            },
            None => Said { value: default, at: None },
        }
    }

    /// A duration of at least `least`.
    pub(super) fn duration(&self, name: &str, default: Duration, least: Duration) -> Said<Duration> {
        self.read(name, default, |field| field.duration(least))
    }

    /// A size in bytes of at least `least`.
    pub(super) fn size(&self, name: &str, default: usize, least: usize) -> usize {
        self.read(name, default, |field| field.size(least)).value
    }

    /// A whole number.
    pub(super) fn count(&self, name: &str, default: u32, range: RangeInclusive<u32>) -> u32 {
        self.read(name, default, |field| field.count(range)).value
    }

    /// A weight: a number from 0 to 100.
    pub(super) fn weight(&self, name: &str, default: f64) -> f64 {
        self.read(name, default, |field| {
            let number = match field.value {
                DeValue::Integer(number) => whole::<u32>(number).map(f64::from),
                DeValue::Float(number) => number.as_str().parse().ok(),
                _ => None,
            };
            let sound = number.filter(|number| (0.0..=100.0).contains(number));
            sound.or_else(|| field.wrong("must be a number from 0 to 100"))
        })
        .value
    }

    /// `true` or `false`.
    pub(super) fn flag(&self, name: &str, default: bool) -> bool {
        self.read(name, default, |field| match field.value {
            DeValue::Boolean(flag) => Some(*flag),
            _ => field.wrong("must be true or false"),
        })
        .value
    }

    /// One of a few words; the first is the default.
    pub(super) fn word<T: Copy>(&self, name: &str, words: &[(&str, T)]) -> T {
        self.read(name, words[0].1, |field| {
            let said = field.value.as_str();
            if let Some((_, value)) = words.iter().find(|(word, _)| Some(*word) == said) {
                return Some(*value);
            }
            let all: Vec<_> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
            field.wrong(&format!("must be {}", either(&all)))
        })
        .value
    }

    /// A list of texts; empty where it is absent.
    pub(super) fn texts(&self, name: &str) -> Vec<Field<'p>> {
        self.get(name).map_or_else(Vec::new, |field| field.texts())
    }

    /// A name by the rule for names.
    pub(super) fn name<T: std::str::FromStr>(&self, name: &str) -> Option<Said<T>> {
        let field = self.get(name)?;
        Some(Said { value: field.name()?, at: Some(field.at) })
    }

    /// A secret from its variable or file, and where it came from, for people.
    pub(super) fn secret(&self, name: &str) -> Option<(Secret, String, Span)> {
        let field = self.get(name)?;
        field.must_be_elsewhere()?;
        field.table("secret")?.secret_of_source(&field, &Shape::default())
    }

    /// The same of a table that is a secret, `owner`, and names a variable or a file.
    pub(super) fn secret_of_source(
        &self,
        owner: &Field<'_>,
        shape: &Shape,
    ) -> Option<(Secret, String, Span)> {
        match (self.get("env"), self.get("file")) {
            (Some(env), None) => env.secret_of_variable(owner, shape),
            (None, Some(file)) => file.secret_of_file(owner, shape),
            _ => {
                let problem =
                    format!("{} must be {{ env = \"VARIABLE\" }} or {{ file = \"/path\" }}", owner.path);
                owner.page.refuse(&owner.at, problem);
                None
            }
        }
    }
}

impl<'p> Field<'p> {
    /// This value as a table with the known fields of `kind`.
    pub(super) fn table(&self, kind: &str) -> Option<Table<'p>> {
        let table = self.open_table()?;
        table.check_fields(kind);
        Some(table)
    }

    /// This value as a table whose fields somebody else checks.
    pub(super) fn open_table(&self) -> Option<Table<'p>> {
        let DeValue::Table(fields) = self.value else {
            return self.wrong("must be a table");
        };
        let (page, path, at) = (self.page, self.path.clone(), self.at.clone());
        Some(Table { page, path, at, fields: Some(fields) })
    }

    /// The elements of this array.
    pub(super) fn items(&self) -> Option<Vec<Field<'p>>> {
        let DeValue::Array(items) = self.value else { return None };
        let item = |(n, item): (usize, &'p Spanned<DeValue<'p>>)| Field {
            page: self.page,
            path: format!("{}[{n}]", self.path),
            at: item.span(),
            value: item.get_ref(),
        };
        Some(items.iter().enumerate().map(item).collect())
    }

    /// The texts of this list.
    pub(super) fn texts(&self) -> Vec<Field<'p>> {
        let Some(mut items) = self.items() else {
            self.wrong::<()>("must be a list of texts");
            return Vec::new();
        };
        items.retain(|item| item.value.is_str() || item.wrong::<()>("must be text").is_some());
        items
    }

    /// Notes that this value is wrong: what it is, and what it must be.
    pub(super) fn wrong<T>(&self, rule: &str) -> Option<T> {
        let hidden = self.page.source.hides(&self.at);
        let is = match self.value {
            DeValue::String(_) if hidden => "a text".into(),
            DeValue::Integer(_) | DeValue::Float(_) if hidden => "a number".into(),
            DeValue::String(text) => shown(text),
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            DeValue::Boolean(flag) => flag.to_string(),
            DeValue::Datetime(_) => "a date".into(),
            DeValue::Array(_) => "a list".into(),
            DeValue::Table(_) => "a table".into(),
        };
        self.page.refuse(&self.at, format!("{} is {is}, {rule}", self.path));
        None
    }

    /// The text, which the caller knows to be one.
    pub(super) fn text(&self) -> Option<&'p str> {
        match self.value {
            DeValue::String(text) => Some(text),
            _ => self.wrong("must be text"),
        }
    }

    /// A name by the rule for names.
    pub(super) fn name<T: std::str::FromStr>(&self) -> Option<T> {
        let text = self.text()?;
        text.parse().ok().or_else(|| self.wrong("must be 1 to 64 of a-z 0-9 . _ -"))
    }

    pub(super) fn duration(&self, least: Duration) -> Option<Duration> {
        let read = match self.value {
            DeValue::String(text) => values::duration(text),
            DeValue::Integer(number) => whole(number).map(Duration::from_secs),
            _ => None,
        };
        let Some(duration) = read else { return self.wrong(values::DURATION_FORM) };
        let rule = if duration < least {
            format!("must be at least {}", values::spell(least))
        } else if duration > values::LONGEST {
            format!("must be at most {}", values::spell(values::LONGEST))
        } else {
            return Some(duration);
        };
        self.page.refuse(&self.at, format!("{} is {}, {rule}", self.path, values::spell(duration)));
        None
    }

    fn size(&self, least: usize) -> Option<usize> {
        let read = match self.value {
            DeValue::String(text) => values::size(text),
            DeValue::Integer(number) => whole(number),
            _ => None,
        };
        match read {
            Some(size) if size < least => self.wrong(&format!("must be at least {least} bytes")),
            Some(size) => Some(size),
            None => self.wrong(values::SIZE_FORM),
        }
    }

    pub(super) fn count(&self, range: RangeInclusive<u32>) -> Option<u32> {
        let rule = if *range.end() == u32::MAX {
            format!("must be a whole number from {}", range.start())
        } else {
            format!("must be a whole number from {} to {}", range.start(), range.end())
        };
        match self.value {
            DeValue::Integer(number) => {
                whole(number).filter(|n| range.contains(n)).or_else(|| self.wrong(&rule))
            }
            _ => self.wrong(&rule),
        }
    }

    /// Refuses a secret that stands in the file itself.
    pub(super) fn must_be_elsewhere(&self) -> Option<()> {
        if self.value.is_table() {
            return Some(());
        }
        let problem = format!(
            "{} must not stand in this file itself: say {{ env = \"VARIABLE\" }} or {{ file = \"/path\" }}",
            self.path
        );
        self.page.refuse(&self.at, problem);
        None
    }

    fn secret_of_variable(&self, owner: &Field<'_>, shape: &Shape) -> Option<(Secret, String, Span)> {
        let name = self.text()?;
        // A raw key may have been pasted here: what does not look like a variable is not repeated.
        let called = if is_plain_variable(name) { name } else { "that it names" };
        let problem = match (self.page.env)(name).map(|text| shape.take(&Zeroizing::new(text))) {
            Some(Ok(secret)) => {
                self.page.variables.borrow_mut().push(name.to_owned());
                return Some((secret, format!("env {name}"), owner.at.clone()));
            }
            Some(Err(problem)) => problem,
            None => "is not set".into(),
        };
        let text = format!("{}: the environment variable {called} {problem}", owner.path);
        self.page.refuse(&self.at, text);
        None
    }

    fn secret_of_file(&self, owner: &Field<'_>, shape: &Shape) -> Option<(Secret, String, Span)> {
        let name = self.text()?;
        let path = self.page.path_to_read(name);
        let called = if is_plain_path(name) {
            path.components().collect::<PathBuf>().display().to_string()
        } else {
            "that it names".to_owned()
        };
        match secrets::read(&path, shape) {
            Ok((secret, warning)) => {
                let source = format!("file {name}");
                if let Some(warning) = warning {
                    self.page.warn(format!("{}: the {source} {warning}", owner.path));
                }
                Some((secret, source, owner.at.clone()))
            }
            Err(problem) => {
                self.page.refuse(&self.at, format!("{}: the file {called} {problem}", owner.path));
                None
            }
        }
    }
}

fn whole<T: TryFrom<u64>>(number: &DeInteger<'_>) -> Option<T> {
    u64::from_str_radix(number.as_str(), number.radix()).ok()?.try_into().ok()
}

/// `a`, `a or b`, `a, b or c`.
pub(super) fn either(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [one] => one.clone(),
        [rest @ .., last] => format!("{} or {last}", rest.join(", ")),
    }
}

/// The directory that a file's relative paths start from.
pub(super) fn dir_of(file: &Path) -> PathBuf {
    file.parent().map(Path::to_path_buf).unwrap_or_default()
}
