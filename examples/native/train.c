/* Train a saved training program with ONNX Runtime's shared library and nothing else: no header, no JSON.

     cc -O2 train.c -ldl -o train && ./train libonnxruntime.so PROGRAM DATA BATCH STEPS

   PROGRAM is a folder written by `og.build_training(...).save("program", defaults=False)`. DATA is a folder with NAME.bin for
   each input of the data and the labels: its numbers as they are in memory, one sample after another. Prints the loss of
   each step. Values are known by position: `initial` gives the learning rate and what moves; `step` takes data, labels and
   those, and gives the loss, outputs and the next of what moves. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { /* slots of OrtApi in version 1 of onnxruntime_c_api.h, which never move */
  MESSAGE = 2, CREATE_ENV = 3, CREATE_SESSION = 7, RUN = 9, CREATE_OPTIONS = 10, NO_MEMORY_PATTERN = 17, THREADS = 24,
  INPUTS = 30, OUTPUTS = 31, INPUT_TYPE = 33, INPUT_NAME = 36, OUTPUT_NAME = 37, CREATE_TENSOR = 49, NUMBERS = 51,
  TENSOR_TYPE = 55, ELEMENT = 60, RANK = 61, SIZES = 62, CPU_MEMORY = 69, FREE = 76, ALLOCATOR = 78, RELEASE_ENV = 92,
  RELEASE_MEMORY = 94, RELEASE_SESSION = 95, RELEASE_VALUE = 96, RELEASE_TYPE = 98, RELEASE_OPTIONS = 100
};
static const size_t WIDTH[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8}; /* bytes of each ONNX element type */
static void *const *api, *env, *options, *memory, *allocator;
#define CALL(slot, result, ...) ((result (*)(__VA_ARGS__))api[slot])

static void fail(const char *what, const char *why) { fprintf(stderr, "%s: %s\n", what, why), exit(1); }
static void check(void *status) { if (status) fail("ONNX Runtime", CALL(MESSAGE, const char *, void *)(status)); }
static void release(void *value) { CALL(RELEASE_VALUE, void, void *)(value); }

typedef struct { void *session; size_t inputs, outputs; char *in[4096], *out[4096]; } Graph;
typedef struct { char *numbers; size_t bytes, rank; int element; int64_t batches, sizes[8]; } Data;

static void names(void *session, int count, int name, size_t *found, char **into) {
  check(CALL(count, void *, void *, size_t *)(session, found));
  if (*found > 4096) fail("ONNX Runtime", "too many inputs or outputs");
  for (size_t i = 0; i < *found; i++)
    check(CALL(name, void *, void *, size_t, void *, char **)(session, i, allocator, into + i));
}
static void open_graph(Graph *g, const char *folder, const char *part) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.onnx", folder, part);
  check(CALL(CREATE_SESSION, void *, void *, const char *, void *, void **)(env, path, options, &g->session));
  names(g->session, INPUTS, INPUT_NAME, &g->inputs, g->in), names(g->session, OUTPUTS, OUTPUT_NAME, &g->outputs, g->out);
}
static void run(Graph *g, void **x, void **y) {
  check(CALL(RUN, void *, void *, void *, char **, void **, size_t, char **, size_t, void **)(
      g->session, NULL, g->in, x, g->inputs, g->out, g->outputs, y));
}
static void close_graph(Graph *g) {
  for (size_t i = 0; i < g->inputs; i++) check(CALL(FREE, void *, void *, void *)(allocator, g->in[i]));
  for (size_t i = 0; i < g->outputs; i++) check(CALL(FREE, void *, void *, void *)(allocator, g->out[i]));
  CALL(RELEASE_SESSION, void, void *)(g->session);
}
static Data read_data(Graph *step, size_t i, const char *folder, int64_t batch) {
  char path[4096];
  void *type, *shape;
  Data d = {0};
  check(CALL(INPUT_TYPE, void *, void *, size_t, void **)(step->session, i, &type));
  check(CALL(TENSOR_TYPE, void *, void *, void **)(type, &shape)), check(CALL(ELEMENT, void *, void *, int *)(shape, &d.element));
  check(CALL(RANK, void *, void *, size_t *)(shape, &d.rank)), check(CALL(SIZES, void *, void *, int64_t *, size_t)(shape, d.sizes, 8));
  CALL(RELEASE_TYPE, void, void *)(type), d.sizes[0] = batch, d.bytes = WIDTH[d.element];
  for (size_t axis = 0; axis < d.rank; axis++) d.bytes *= (size_t)d.sizes[axis];
  snprintf(path, sizeof path, "%s/%s.bin", folder, step->in[i]);
  FILE *file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) fail(path, "cannot be read");
  size_t size = (size_t)ftell(file);
  rewind(file), d.numbers = malloc(size), d.batches = (int64_t)(size / d.bytes);
  if (!d.batches || fread(d.numbers, 1, size, file) != size) fail(path, "holds less than one batch");
  return fclose(file), d;
}
int main(int argc, char **argv) {
  static Graph initial, step;
  void *library = argc == 6 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (!library) fail("train LIBRARY PROGRAM DATA BATCH STEPS", argc == 6 ? dlerror() : "five arguments are needed");
  void *const *base = ((void *const *(*)(void))dlsym(library, "OrtGetApiBase"))();
  api = ((void *const *(*)(uint32_t))base[0])(1);
  check(CALL(CREATE_ENV, void *, int, const char *, void **)(3, "train", &env)), check(CALL(CREATE_OPTIONS, void *, void **)(&options));
  check(CALL(THREADS, void *, void *, int)(options, 1)), check(CALL(NO_MEMORY_PATTERN, void *, void *)(options));
  check(CALL(ALLOCATOR, void *, void **)(&allocator)), check(CALL(CPU_MEMORY, void *, int, int, void **)(1, 0, &memory));
  open_graph(&initial, argv[2], "initial"), open_graph(&step, argv[2], "step");
  size_t fed = step.inputs - initial.outputs, moving = initial.outputs - 1, results = step.outputs - moving;
  void *x[4096] = {0}, *y[4096] = {0}, *loss;
  Data data[8];
  for (size_t i = 0; i < fed; i++) data[i] = read_data(&step, i, argv[3], atoll(argv[4]));
  run(&initial, NULL, x + fed);
  for (int64_t s = 0; s < atoll(argv[5]); s++) {
    for (size_t i = 0; i < fed; i++) {
      Data *d = &data[i]; /* the next batch; after the last, the first again */
      check(CALL(CREATE_TENSOR, void *, void *, void *, size_t, int64_t *, size_t, int, void **)(
          memory, d->numbers + (size_t)(s % d->batches) * d->bytes, d->bytes, d->sizes, d->rank, d->element, &x[i]));
    }
    run(&step, x, y), check(CALL(NUMBERS, void *, void *, void **)(y[0], &loss)), printf("%.9g\n", *(float *)loss);
    for (size_t i = 0; i < fed; i++) release(x[i]);
    for (size_t i = 0; i < results; i++) release(y[i]), y[i] = NULL;
    for (size_t i = 0; i < moving; i++) release(x[fed + 1 + i]), x[fed + 1 + i] = y[results + i], y[results + i] = NULL;
  }
  for (size_t i = 0; i < initial.outputs; i++) release(x[fed + i]);
  for (size_t i = 0; i < fed; i++) free(data[i].numbers);
  close_graph(&initial), close_graph(&step), CALL(RELEASE_MEMORY, void, void *)(memory);
  CALL(RELEASE_OPTIONS, void, void *)(options), CALL(RELEASE_ENV, void, void *)(env);
}
