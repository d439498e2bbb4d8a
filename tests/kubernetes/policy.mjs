// Does to pods what an API server does with admission policies: evaluates their expressions, applies the patch,
// then says what would be refused or warned of. The file that is named has {policies, reviews}; one result for each
// review is printed.
//
// Kubernetes' own additions to CEL are stood in for as little as it takes: its functions below, `variables.x` as
// a name `variables_x` (so that each has the type that its expression was checked to have), and `Object.…{…}` and
// `JSONPatch{…}`, which this evaluator cannot construct, as calls with a map. Every expression is checked for types before
// it runs, with lists and maps of one type as Kubernetes demands.
import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { isIP } from 'node:net'
import { pathToFileURL } from 'node:url'

const require = createRequire(`${process.env.KUBERNETES_TOOLS}/node/`)
const { Environment } = await import(pathToFileURL(require.resolve('@marcbachmann/cel-js')))

const CONSTRUCTED = /^(Object(?:\.[A-Za-z]+)*|JSONPatch)\s*\{/
const VARIABLE = /^variables\.([A-Za-z]+)/
const TEXT = /^(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")/
const FIELD = /^(\s*)([A-Za-z]+)(\s*:)/

/** An expression in words that the evaluator knows. */
export function rewritten(text) {
  let out = ''
  const open = [] // what each bracket that is open is
  let atField = false // just behind the `{` or a `,` of something constructed
  while (text) {
    const before = out.at(-1) ?? ' '
    let found
    if (atField && (found = FIELD.exec(text))) {
      out += `${found[1]}"${found[2]}"${found[3]} dyn(`
      open.push('field')
    } else if ((found = TEXT.exec(text))) {
      out += found[0]
    } else if (!/[A-Za-z0-9_.]/.test(before) && (found = CONSTRUCTED.exec(text))) {
      out += found[1] === 'JSONPatch' ? 'operation({' : 'constructed({'
      open.push('constructed')
    } else if (!/[A-Za-z0-9_.]/.test(before) && (found = VARIABLE.exec(text))) {
      out += `variables_${found[1]}`
    } else {
      found = [text[0]]
      if ('([{'.includes(text[0])) open.push(text[0])
      const ends = text[0] === '}' || (text[0] === ',' && open.at(-1) === 'field')
      if (ends && open.at(-1) === 'field') {
        open.pop()
        out += ')'
      }
      out += text[0]
      if (')]}'.includes(text[0]) && open.pop() === 'constructed') out += ')'
    }
    const last = found[0].at(-1)
    atField = open.at(-1) === 'constructed' && (last === '{' || last === ',' || (atField && /\s/.test(found[0])))
    text = text.slice(found[0].length)
  }
  return out
}

const AMOUNTS = { n: 1e-9, u: 1e-6, m: 1e-3, '': 1, k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, E: 1e18 }
'KMGTPE'.split('').forEach((prefix, at) => (AMOUNTS[`${prefix}i`] = 1024 ** (at + 1)))

class Quantity {
  constructor(text) {
    const [, number, suffix] = /^([0-9.]+)([A-Za-z]*)$/.exec(text)
    this.amount = Number(number) * AMOUNTS[suffix]
  }
}

class Operation {
  constructor(fields) {
    Object.assign(this, fields)
  }
}

function environment() {
  const env = new Environment({ homogeneousAggregateLiterals: true })
  env.registerType('Operation', { ctor: Operation, fields: { op: 'string', path: 'string', value: 'dyn' } })
  env.registerType('Quantity', { ctor: Quantity, fields: { amount: 'double' } })
  env.registerVariable('object', 'dyn')
  env.registerVariable('request', 'dyn')
  env.registerFunction('operation(map<string, dyn>): Operation', (fields) => new Operation(fields))
  env.registerFunction('constructed(map<string, dyn>): dyn', (fields) => fields)
  env.registerFunction('string.replace(string, string): string', (text, from, to) => text.replaceAll(from, to))
  const place = (find) => (list, item) => BigInt(find.call([...list], item))
  env.registerFunction('list.indexOf(dyn): int', place(Array.prototype.indexOf))
  env.registerFunction('list.lastIndexOf(dyn): int', place(Array.prototype.lastIndexOf))
  env.registerFunction('isIP(string): bool', (text) => isIP(text) !== 0)
  env.registerFunction('quantity(string): Quantity', (text) => new Quantity(text))
  env.registerFunction('Quantity.compareTo(Quantity): int', (a, b) => BigInt(Math.sign(a.amount - b.amount)))
  return env
}

/** JSON as CEL sees it: whole numbers are ints, and nothing is null, as an API server drops what is. */
function toCel(value) {
  if (Array.isArray(value)) return value.map(toCel)
  if (typeof value === 'number') return Number.isInteger(value) ? BigInt(value) : value
  if (typeof value !== 'object' || value === null) return value
  const there = Object.entries(value).filter(([, member]) => member !== null)
  return Object.fromEntries(there.map(([name, member]) => [name, toCel(member)]))
}

function fromCel(value) {
  if (typeof value === 'bigint') return Number(value)
  if (Array.isArray(value)) return value.map(fromCel)
  if (value instanceof Map) return Object.fromEntries([...value].map(([name, member]) => [name, fromCel(member)]))
  if (typeof value !== 'object' || value === null) return value
  return Object.fromEntries(Object.entries(value).map(([name, member]) => [name, fromCel(member)]))
}

/** All expressions of a policy, checked for types. */
class Policy {
  constructor(policy) {
    this.env = environment()
    this.variables = (policy.spec.variables ?? []).map(({ name, expression }) => {
      const { type, run } = this.compiled(`variable ${name}`, expression)
      this.env.registerVariable(`variables_${name}`, type)
      return { name, run }
    })
    const mutations = policy.spec.mutations ?? []
    this.mutations = mutations.map((one) => this.compiled('mutation', one.jsonPatch.expression, 'list<Operation>'))
    this.validations = (policy.spec.validations ?? []).map((one) => ({
      holds: this.compiled('validation', one.expression, 'bool'),
      message: one.messageExpression ? this.compiled('message', one.messageExpression, 'string') : { run: () => one.message },
    }))
  }

  compiled(what, expression, wanted) {
    const text = rewritten(expression)
    const env = this.env
    const { valid, type, error } = env.check(text)
    if (!valid) throw new Error(`${what}: ${error.message}\nin ${expression}`)
    if (wanted && type !== wanted) throw new Error(`${what} is a ${type} and not a ${wanted}`)
    const run = env.parse(text)
    return { type, run: (context) => this.say(what, expression, run, context) }
  }

  say(what, expression, run, context) {
    try {
      return run(context)
    } catch (cause) {
      throw new Error(`${what}: ${cause.message}\nin ${expression}`)
    }
  }

  /** What the expressions see; a variable is evaluated when it is asked for, as in an API server. */
  context(object, namespace) {
    const context = { object: toCel(object), request: { namespace } }
    for (const { name, run } of this.variables) {
      let value
      Object.defineProperty(context, `variables_${name}`, { enumerable: true, get: () => (value ??= run(context)) })
    }
    return context
  }

  patch(object, namespace) {
    return this.mutations.flatMap(({ run }) => fromCel(run(this.context(object, namespace))))
  }

  failures(object, namespace) {
    const context = this.context(object, namespace)
    return this.validations.filter(({ holds }) => holds.run(context) !== true).map(({ message }) => message.run(context))
  }
}

/** RFC 6902, of which policies here use `add` alone. */
function applied(object, patch) {
  const pod = structuredClone(object)
  for (const { op, path, value } of patch) {
    if (op !== 'add') throw new Error(`${op} at ${path}: only add is used`)
    const steps = path.split('/').slice(1).map((step) => step.replaceAll('~1', '/').replaceAll('~0', '~'))
    const last = steps.pop()
    const parent = steps.reduce((at, step) => at?.[step], pod)
    if (Array.isArray(parent)) parent.splice(last === '-' ? parent.length : Number(last), 0, structuredClone(value))
    else if (typeof parent === 'object' && parent !== null) parent[last] = structuredClone(value)
    else throw new Error(`nothing to add to at ${path}`)
  }
  return pod
}

/** A label selector; an absent one selects all. */
function selects(selector, labels) {
  const exact = Object.entries(selector?.matchLabels ?? {}).every(([key, value]) => labels[key] === value)
  const rules = {
    In: ({ key, values }) => values.includes(labels[key]),
    NotIn: ({ key, values }) => !values.includes(labels[key]),
    Exists: ({ key }) => key in labels,
    DoesNotExist: ({ key }) => !(key in labels),
  }
  return exact && (selector?.matchExpressions ?? []).every((rule) => rules[rule.operator](rule))
}

/** The bindings of a policy that bear on a review. */
function bound(policy, bindings, review) {
  const resource = ['pods', review.subResource].filter(Boolean).join('/')
  const concerns = policy.spec.matchConstraints.resourceRules.some(
    (rule) => rule.operations.includes(review.operation ?? 'CREATE') && rule.resources.includes(resource),
  )
  const namespace = { 'kubernetes.io/metadata.name': review.namespace, ...review.namespaceLabels }
  return bindings.filter(
    ({ spec }) =>
      concerns &&
      spec.policyName === policy.metadata.name &&
      selects(spec.matchResources?.namespaceSelector, namespace) &&
      selects(spec.matchResources?.objectSelector, review.object.metadata?.labels ?? {}),
  )
}

function main() {
  const { policies, reviews } = JSON.parse(readFileSync(process.argv[2]))
  const of = (kind) => policies.filter((policy) => policy.kind === kind)
  const compiled = new Map(
    [...of('MutatingAdmissionPolicy'), ...of('ValidatingAdmissionPolicy')].map((one) => [one, new Policy(one)]),
  )
  const answer = (review) => {
    const pass = (pod) =>
      of('MutatingAdmissionPolicy')
        .filter((one) => bound(one, of('MutatingAdmissionPolicyBinding'), { ...review, object: pod }).length > 0)
        .reduce((now, one) => applied(now, compiled.get(one).patch(now, review.namespace)), pod)
    const pod = pass(fromCel(toCel(review.object)))
    const said = (action) =>
      of('ValidatingAdmissionPolicy').flatMap((one) => {
        const bindings = bound(one, of('ValidatingAdmissionPolicyBinding'), { ...review, object: pod })
        const acts = bindings.some(({ spec }) => spec.validationActions.includes(action))
        return acts ? compiled.get(one).failures(pod, review.namespace) : []
      })
    return { pod, again: pass(pod), denied: said('Deny'), warnings: said('Warn') }
  }
  console.log(JSON.stringify(reviews.map(answer)))
}

if (process.argv[2] === 'rewrite') console.log(rewritten(process.argv[3]))
else main()
