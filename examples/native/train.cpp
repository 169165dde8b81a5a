// Train a saved training program with ONNX Runtime's C++ interface.
//
//   c++ -std=c++17 -O2 -I INCLUDE train.cpp -o train LIBRARY && ./train PROGRAM DATA BATCH STEPS
//
// INCLUDE has onnxruntime_cxx_api.h (the release archives and the package libonnxruntime-dev have it), LIBRARY is
// libonnxruntime.so of that version or a later one. PROGRAM and DATA are as for train.c. Values are known by position.
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

struct Graph {
  Ort::Session session;
  std::vector<std::string> in, out;

  Graph(Ort::Env& env, const std::string& path, const Ort::SessionOptions& options)
      : session(env, path.c_str(), options) {
    Ort::AllocatorWithDefaultOptions allocator;
    for (size_t i = 0; i < session.GetInputCount(); i++) in.emplace_back(session.GetInputNameAllocated(i, allocator).get());
    for (size_t i = 0; i < session.GetOutputCount(); i++) out.emplace_back(session.GetOutputNameAllocated(i, allocator).get());
  }
  std::vector<Ort::Value> run(const std::vector<Ort::Value>& x) {
    std::vector<const char*> given, made;
    for (auto& name : in) given.push_back(name.c_str());
    for (auto& name : out) made.push_back(name.c_str());
    return session.Run(Ort::RunOptions{nullptr}, given.data(), x.data(), x.size(), made.data(), made.size());
  }
};

struct Data {  // the numbers of one input, and the shape of a batch of it
  std::vector<char> numbers;
  std::vector<int64_t> shape;
  ONNXTensorElementDataType type;
  size_t bytes;
};

static Data read(Graph& step, size_t i, const std::string& folder, int64_t batch) {
  static const size_t width[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8};
  auto info = step.session.GetInputTypeInfo(i);
  auto declared = info.GetTensorTypeAndShapeInfo();
  Data d{{}, declared.GetShape(), declared.GetElementType(), 0};
  d.shape[0] = batch;
  d.bytes = std::accumulate(d.shape.begin(), d.shape.end(), width[d.type], std::multiplies<size_t>());
  std::ifstream file(folder + "/" + step.in[i] + ".bin", std::ios::binary);
  d.numbers.assign(std::istreambuf_iterator<char>(file), {});
  if (d.numbers.size() < d.bytes) throw std::runtime_error(step.in[i] + ".bin holds less than one batch");
  return d;
}

int main(int argc, char** argv) try {
  if (argc != 5) throw std::runtime_error("usage: train PROGRAM DATA BATCH STEPS");
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "train");
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(1).DisableMemPattern();
  const std::string program = argv[1];
  Graph initial(env, program + "/initial.onnx", options), step(env, program + "/step.onnx", options);
  auto held = initial.run({});  // the learning rate, and the values that move
  const size_t moving = held.size() - 1, fed = step.in.size() - held.size();
  std::vector<Data> data;
  for (size_t i = 0; i < fed; i++) data.push_back(read(step, i, argv[2], std::atoll(argv[3])));
  auto memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU);
  for (int64_t s = 0; s < std::atoll(argv[4]); s++) {
    std::vector<Ort::Value> x;
    for (auto& d : data) {  // the next batch; after the last, the first again
      char* start = d.numbers.data() + s % (d.numbers.size() / d.bytes) * d.bytes;
      x.push_back(Ort::Value::CreateTensor(memory, start, d.bytes, d.shape.data(), d.shape.size(), d.type));
    }
    for (auto& value : held) x.push_back(std::move(value));
    auto y = step.run(x);
    std::printf("%.9g\n", *y[0].GetTensorData<float>());
    held[0] = std::move(x[fed]);
    for (size_t i = 0; i < moving; i++) held[1 + i] = std::move(y[y.size() - moving + i]);
  }
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
